"""The framework adapters, by name: the one place where the core knows them.

An adapter is put in when its framework has been imported, and tells three things: where steps
begin and end, what each process group is for, and which modules communicate only to time
themselves. Nothing else depends on the framework.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Mapping
from typing import Protocol

from torch._C._distributed_c10d import ProcessGroup

from ranklens_core.c10d.peers import Peers
from ranklens_core.import_hook import ImportHook
from ranklens_core.steps import Steps

log = logging.getLogger("ranklens")

ADAPTERS = {
    "megatron.core": "ranklens_megatron.adapter",
    "deepspeed": "ranklens_deepspeed.adapter",
}
"""Imported module -> module whose ``Adapter`` class serves it."""

TIMER_FILES = ("megatron/core/timers.py", "deepspeed/utils/timer.py")
"""Endings of module files that communicate only to time the program."""


class Adapter(Protocol):
    """What ``ranklens_<framework>.adapter.Adapter(steps)`` gives; creating it patches the framework."""

    framework: str

    def roles(self) -> Mapping[ProcessGroup, str]:
        """What the framework uses each of its groups for, as far as they exist now."""
        ...

    def believe_peers(self, peers: Peers) -> None:
        """No peer is real: tell ``peers`` what only the framework knows of them, shapes and sizes."""
        ...

    def remove(self) -> None:
        """Leave the framework as it was. Idempotent."""
        ...


class Adapters:
    """The adapters of the frameworks this program imports.

    ``strict``: an adapter that cannot be put in is an error (replay). Otherwise (recording) it is
    logged, and the program goes on with steps from its optimizer and groups without roles. ``peers``
    is given where results are made up, see ``Adapter.believe_peers``.
    """

    def __init__(self, steps: Steps, *, strict: bool, peers: Peers | None = None) -> None:
        self._steps = steps
        self._peers = peers
        self._strict = strict
        self.active: list[Adapter] = []
        self._hook = ImportHook({name: self._put_in(module) for name, module in ADAPTERS.items()})

    def _put_in(self, module: str) -> Callable[[], None]:
        def put_in() -> None:
            try:
                adapter: Adapter = importlib.import_module(module).Adapter(self._steps)
                self.active.append(adapter)
                if self._peers is not None:
                    adapter.believe_peers(self._peers)
            except Exception as error:
                if self._strict:
                    raise
                log.exception("%s does not fit this version of its framework: %s", module, error)

        return put_in

    def roles(self) -> dict[ProcessGroup, str]:
        """Roles of all known groups; a group with several has them joined by ``+``."""
        found: dict[ProcessGroup, list[str]] = {}
        for adapter in self.active:
            for pg, role in adapter.roles().items():
                for part in role.split("+"):
                    roles = found.setdefault(pg, [])
                    if part not in roles:
                        roles.append(part)
        return {pg: "+".join(roles) for pg, roles in found.items()}

    def remove(self) -> None:
        """Take every adapter out. Idempotent."""
        self._hook.remove()
        while self.active:
            self.active.pop().remove()
