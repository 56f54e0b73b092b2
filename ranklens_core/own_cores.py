"""Local ranks on the cores of this machine: some with a core of their own, the others on what is left.

A rank's own core is for its main thread, which is the program. The backend's and the recorder's threads of
the rank run with the other ranks: they do not exist in a replay, and on a real machine a NIC does their work.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass

from ranklens_core.errors import UsageError


@dataclass(frozen=True)
class CorePlan:
    """Which rank has which core to itself (``own``), and which cores the others share (``shared``)."""

    own: dict[int, int]
    shared: frozenset[int]

    def settle(self, rank: int) -> None:
        """Put the calling process, which is ``rank`` and has one thread, on its cores."""
        os.sched_setaffinity(0, {self.own[rank]} if rank in self.own else self.shared)

    def move_helpers(self, rank: int) -> None:
        """Off the rank's own core with all its threads but the main one, where it has one."""
        if rank not in self.own:
            return
        for name in os.listdir("/proc/self/task"):
            if int(name) != os.getpid():
                with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
                    os.sched_setaffinity(int(name), self.shared)


def plan_cores(own_ranks: Sequence[int], nproc: int) -> CorePlan:
    """The last cores of this process's go to ``own_ranks`` in order, the first are shared.

    Raises UsageError for a rank outside the world and where no core is left for the others.
    """
    if not hasattr(os, "sched_setaffinity"):
        raise UsageError("--own-core needs Linux: elsewhere a process cannot be kept on a core.")
    cores = sorted(os.sched_getaffinity(0))
    for rank in own_ranks:
        if not 0 <= rank < nproc:
            raise UsageError(f"--own-core {rank}: not one of the {nproc} ranks (0 to {nproc - 1}).")
    if len(own_ranks) >= len(cores):
        raise UsageError(
            f"--own-core for {len(own_ranks)} ranks, but there are {len(cores)} cores here, of which one at "
            "least is for everything else. Name fewer ranks."
        )
    shared = len(cores) - len(own_ranks)
    return CorePlan(dict(zip(own_ranks, cores[shared:], strict=True)), frozenset(cores[:shared]))
