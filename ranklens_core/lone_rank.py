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
from ranklens_core.c10d.groups import Groups
from ranklens_core.c10d.interpose import install
from ranklens_core.c10d.patience import Patience
from ranklens_core.c10d.peers import Peers
from ranklens_core.c10d.signature import Signatures
from ranklens_core.c10d.site import Sites
from ranklens_core.c10d.synthesise import Synthesiser
from ranklens_core.c10d.unwritten import Unwritten
from ranklens_core.c10d.world import OneRankWorld, let_fake_groups_coalesce
from ranklens_core.clock import Clock
from ranklens_core.errors import UnsupportedError
from ranklens_core.leaving import before_exec
from ranklens_core.load_alone import load_alone
from ranklens_core.patches import Patches
from ranklens_core.place import check_place
from ranklens_core.printed import PrintedMetrics
from ranklens_core.replayer import Replayer
from ranklens_core.schema import GroupRecord, Printed, Step
from ranklens_core.steps import OptimizerSteps, Steps

MASTER_PORT = "29500"
"""torchrun's own default; nobody listens there, a program may only read it."""


class LoneRank:
    """Installs everything but the replayer; ``start`` does that, ``undo`` takes all of it back.

    ``local_world_size`` is how many ranks the job has on this rank's host; ``backend`` is the real
    job's, None if the program is the first to say it. ``makes_up`` says that results will be made up: then
    fresh buffers are zero, and frameworks compare this rank with itself where they compare ranks.
    With ``loads_alone`` distributed checkpoints are loaded without asking peers. ``first_step`` is the number
    of the program's first step.
    ``on_step_begin`` is told that the first step begins, ``on_step_end`` that one
    is over. ``refused`` is the error of what the program did that nobody can stand in for (wait for a peer's
    word in a Store, replace itself), also where it caught that error. Raises ``UsageError`` if the
    environment or torch.distributed is taken.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        *,
        local_rank: int,
        local_world_size: int,
        backend: str | None,
        clock: Clock,
        makes_up: bool = False,
        loads_alone: bool = False,
        first_step: int = 0,
        on_step_end: Callable[[Step], None],
        on_step_begin: Callable[[], None] = lambda: None,
    ) -> None:
        self.rank, self.world_size = rank, world_size
        self.patches = Patches()
        self.made: dict[str, GroupRecord] = {}
        self.printed: list[Printed] = []
        self.frameworks: frozenset[str] = frozenset()
        self.refused: UnsupportedError | None = None
        self._replayer: Replayer | None = None
        check_place(os.environ, rank, world_size)
        try:
            mark_active(self.patches)
            self._set_place(local_rank, local_world_size)
            # where a call was made is looked up only for the messages that need it
            self.sites = Sites(TIMER_FILES)
            patience = Patience(
                clock=clock, progress=self._progress, site=self._program_site, on_stuck=self._keep_refused
            )
            self.patches.on_undo(OneRankWorld(rank, world_size, patience).remove)
            before_exec(self.patches, self._refuse_exec)
            let_fake_groups_coalesce(self.patches, backend)
            self.groups = Groups(self._keep_group)
            self.patches.on_undo(self.groups.close)
            self.steps = Steps(clock, on_step_begin, on_step_end, first_step)
            peers = Peers()
            self.synthesiser = Synthesiser(peers, Unwritten(self.patches) if makes_up else None)
            self.adapters = Adapters(self.steps, strict=False, peers=peers if makes_up else None)
            self.patches.on_undo(self.adapters.remove)
            self.bypasses = Bypasses(refuse)
            self.patches.on_undo(self.bypasses.remove)
            if loads_alone:
                load_alone(self.patches)
            self.signatures = Signatures(self.groups, None, lambda _: None)
        except BaseException:
            self.undo()
            raise

    def start(self, replayer: Replayer) -> None:
        """Send the program's calls to ``replayer`` and watch its steps and what it prints."""
        self._replayer = replayer
        self.patches.on_undo(OptimizerSteps(self.steps).remove)
        self.patches.on_undo(PrintedMetrics(self.printed.append, lambda: self.steps.index).remove)
        self.patches.on_undo(install(replayer).remove)

    def undo(self) -> None:
        """Leave torch, the frameworks and the environment as they were. Idempotent."""
        if not self.frameworks and hasattr(self, "adapters"):
            self.frameworks = frozenset(adapter.framework for adapter in self.adapters.active)
            self._name_roles(self.adapters.roles())
        self.patches.undo()

    def _progress(self) -> tuple[int, int]:
        """What changes as the training goes on: calls made, steps done."""
        return (self._replayer.replayed if self._replayer else 0), len(self.steps.done)

    def _program_site(self) -> str:
        site = self.sites.find()
        return site.program_site or site.site

    def _keep_refused(self, error: UnsupportedError) -> None:
        self.refused = error

    def _refuse_exec(self, what: str) -> None:
        site = self._program_site()
        self._keep_refused(
            UnsupportedError(
                f"The program replaces itself by {what}{f' at {site}' if site else ''}: what it becomes "
                "would run outside the replay. Do first what it starts over for (often a variable: set it "
                "before the replay), so that it need not."
            )
        )
        assert self.refused is not None
        raise self.refused

    def _name_roles(self, roles: dict[ProcessGroup, str]) -> None:
        by_key = {self.groups.key_of(pg): role for pg, role in roles.items()}
        for key, group in self.made.items():
            self.made[key] = msgspec.structs.replace(group, role=by_key.get(key, group.role))

    def _keep_group(self, group: GroupRecord) -> None:
        self.made[group.key] = group

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
