"""A list of changes to other people's objects that can be taken back exactly."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from contextlib import AbstractContextManager, ExitStack
from typing import Any, TypeVar

_K = TypeVar("_K")
_V = TypeVar("_V")
_T = TypeVar("_T")

_ABSENT: Any = object()


def _own_attribute(obj: object, name: str) -> Any:
    """What ``obj`` itself holds under ``name``: not inherited, descriptors as they are; else `_ABSENT`."""
    own = getattr(obj, "__dict__", None)
    if own is not None and name in own:
        return own[name]
    # A slot, or a module that keeps its values elsewhere (torch's config modules), shows only in getattr. On
    # a class, or where a class provides the default, what getattr finds is inherited and nobody's to restore.
    if isinstance(obj, type) or (own is not None and hasattr(type(obj), name)):
        return _ABSENT
    return getattr(obj, name, _ABSENT)


class Patches:
    """Changes made through this object, undone in reverse order by `undo`.

    Everything that changes torch, a framework or the environment goes through one of these, so that removing
    RankLens leaves the process as it was. Also a context manager: leaving the block undoes.
    """

    def __init__(self) -> None:
        self._stack = ExitStack()

    def set(self, obj: object, name: str, value: object) -> None:
        """Set attribute ``name`` of a module, class or instance; undoing restores or deletes it."""
        previous = _own_attribute(obj, name)
        setattr(obj, name, value)
        if previous is _ABSENT:
            self._stack.callback(delattr, obj, name)
        else:
            self._stack.callback(setattr, obj, name, previous)

    def setitem(self, mapping: MutableMapping[_K, _V], key: _K, value: _V) -> None:
        """Set ``mapping[key]``; undoing restores it, or removes a new key."""
        previous = mapping.get(key, _ABSENT)
        mapping[key] = value
        if previous is _ABSENT:
            self._stack.callback(mapping.pop, key, None)
        else:
            self._stack.callback(mapping.__setitem__, key, previous)

    def enter(self, context: AbstractContextManager[_T]) -> _T:
        """Enter ``context`` now; undoing leaves it. Returns what it yields."""
        return self._stack.enter_context(context)

    def on_undo(self, function: Callable[..., object], *args: object) -> None:
        """Call ``function(*args)`` when undoing, for a change that was made by other means."""
        self._stack.callback(function, *args)

    def undo(self) -> None:
        """Take every change back, the last one first. Does nothing the second time.

        A step that raises does not stop the others; its error is raised after the last of them.
        """
        self._stack.close()

    def __enter__(self) -> Patches:
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()
