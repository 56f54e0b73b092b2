"""Run a callback when a module has been imported, now or later."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


class ImportHook(MetaPathFinder):
    """Calls ``callbacks[name]()`` once after ``name`` is imported; at once if it already is."""

    def __init__(self, callbacks: dict[str, Callable[[], None]]) -> None:
        self._waiting = dict(callbacks)
        for name in [name for name in self._waiting if name in sys.modules]:
            self._waiting.pop(name)()
        sys.meta_path.insert(0, self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The ordinary spec of a waited-for module, with its callback after the execution."""
        if fullname not in self._waiting:
            return None
        spec = self._found_by_others(fullname, path, target)
        if spec is None or spec.loader is None:
            return None
        spec.loader = _CallAfter(spec.loader, lambda: self._imported(fullname))
        return spec

    def _imported(self, name: str) -> None:
        """Only now: programs also ask for a module's spec just to learn whether there is one."""
        callback = self._waiting.pop(name, None)
        if callback is not None:
            callback()

    def _found_by_others(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None
    ) -> ModuleSpec | None:
        """What the finders after this one find: another hook may wait for the same module."""
        for finder in sys.meta_path[sys.meta_path.index(self) + 1 :]:
            find_spec = getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = find_spec(fullname, path, target) if find_spec else None
            if spec is not None:
                return spec
        return None

    def remove(self) -> None:
        """Wait no longer. Idempotent."""
        self._waiting.clear()
        if self in sys.meta_path:
            sys.meta_path.remove(self)


class _CallAfter(Loader):
    def __init__(self, loader: Loader, callback: Callable[[], None]) -> None:
        self._loader = loader
        self._callback = callback

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        # later imports of its submodules and resources must find the ordinary loader
        ordinary = self._loader
        while isinstance(ordinary, _CallAfter):
            ordinary = ordinary._loader
        module.__loader__ = ordinary
        if module.__spec__ is not None:
            module.__spec__.loader = ordinary
        self._callback()
