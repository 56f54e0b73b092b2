"""One rank of a job alone in a process: its place, its world, its steps; what replay and emulation share."""

from __future__ import annotations

import os
from collections.abc import Callable

import msgspec
import torch
from torch._C._distributed_c10d import ProcessGroup

from ranklens_core.active import mark_active
from ranklens_core.adapters import TIMER_FILES, Adapters
from ranklens_core.bypass import Bypasses, refuse
from ranklens_core.c10d.call import Handler
from ranklens_core.c10d.groups import Groups
from ranklens_core.c10d.interpose import install
from ranklens_core.c10d.signature import Signatures
from ranklens_core.c10d.site import Sites
from ranklens_core.c10d.world import OneRankWorld, let_fake_groups_coalesce
from ranklens_core.clock import Clock
from ranklens_core.patches import Patches
from ranklens_core.place import check_place
from ranklens_core.printed import PrintedMetrics
from ranklens_core.schema import GroupRecord, Printed, Step
from ranklens_core.steps import OptimizerSteps, Steps

MASTER_PORT = "29500"
"""torchrun's own default; nobody listens there, a program may only read it."""


class LoneRank:
    """Installs everything but the handler; ``start`` does that, ``undo`` takes all of it back.

    ``local_world_size`` is how many ranks the job has on this rank's host; ``backend`` is the real
    job's, ``""`` if unknown. Raises ``UsageError`` if the environment or torch.distributed is taken.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        *,
        local_rank: int,
        local_world_size: int,
        backend: str,
        clock: Clock,
        on_step_end: Callable[[Step], None],
    ) -> None:
        self.rank, self.world_size = rank, world_size
        self.patches = Patches()
        self.made: list[GroupRecord] = []
        self.printed: list[Printed] = []
        self.frameworks: frozenset[str] = frozenset()
        check_place(os.environ, rank, world_size)
        try:
            mark_active(self.patches)
            self._set_place(local_rank, local_world_size)
            self.patches.on_undo(OneRankWorld(rank, world_size).remove)
            let_fake_groups_coalesce(self.patches, backend)
            self.groups = Groups(self.made.append)
            self.patches.on_undo(self.groups.close)
            self.steps = Steps(clock, lambda: None, on_step_end)
            self.adapters = Adapters(self.steps, strict=False)
            self.patches.on_undo(self.adapters.remove)
            self.bypasses = Bypasses(refuse)
            self.patches.on_undo(self.bypasses.remove)
            # where a call was made is looked up only for the messages that need it
            self.sites = Sites(TIMER_FILES)
            self.signatures = Signatures(self.groups, None, lambda _: None)
        except BaseException:
            self.undo()
            raise

    def start(self, handler: Handler) -> None:
        """Send the program's calls to ``handler`` and watch its steps and what it prints."""
        self.patches.on_undo(OptimizerSteps(self.steps).remove)
        self.patches.on_undo(PrintedMetrics(self.printed.append).remove)
        self.patches.on_undo(install(handler).remove)

    def undo(self) -> None:
        """Leave torch, the frameworks and the environment as they were. Idempotent."""
        if not self.frameworks and hasattr(self, "adapters"):
            self.frameworks = frozenset(adapter.framework for adapter in self.adapters.active)
            self._name_roles(self.adapters.roles())
        self.patches.undo()

    def _name_roles(self, roles: dict[ProcessGroup, str]) -> None:
        by_key = {self.groups.key_of(pg): role for pg, role in roles.items()}
        self.made[:] = [
            msgspec.structs.replace(group, role=by_key.get(group.key, group.role)) for group in self.made
        ]

    def _set_place(self, local_rank: int, local_world_size: int) -> None:
        """RANK and its kin as a launcher would set them, but on this machine's devices."""
        if torch.cuda.is_available() and local_rank >= torch.cuda.device_count():
            local_rank = 0
        place = {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(local_rank),
            "LOCAL_WORLD_SIZE": str(max(local_rank + 1, local_world_size)),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": MASTER_PORT,
        }
        for name, value in place.items():
            self.patches.setitem(os.environ, name, value)
