"""Local ranks on the cores of this machine: some with a core of their own, the others on what is left.

A rank's own core is for its main thread, which is the program. The backend's and the recorder's threads of
the rank run with the other ranks: they do not exist in a replay, and on a real machine a NIC does their work.

While its rank waits for ranks that share a core, which is long, a core of its own would sleep, and what a
program computes after a long sleep takes 1.2 to 1.4 times as long as after a short one (measured in a
virtual machine: the host gives a sleeping core away). So it is kept awake.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ranklens_core.errors import UsageError

_KEEP_AWAKE = """
import os, sys
os.sched_setaffinity(0, {int(sys.argv[1])})
os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
print(flush=True)
while os.getppid() == int(sys.argv[2]):
    for _ in range(1_000_000):
        pass
"""
"""A process that runs only while nothing else wants the core, and no longer than its parent lives."""


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

    @contextlib.contextmanager
    def kept_awake(self) -> Iterator[None]:
        """The cores in ``own`` do not sleep, and this process stays off them."""
        before = os.sched_getaffinity(0)
        with contextlib.ExitStack() as undo:
            for core in self.own.values():
                keeper = subprocess.Popen(
                    [sys.executable, "-ISc", _KEEP_AWAKE, str(core), str(os.getpid())],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                )
                undo.callback(_end, keeper)
                assert keeper.stdout is not None
                keeper.stdout.readline()  # it has left everybody else's cores
            os.sched_setaffinity(0, self.shared)
            undo.callback(os.sched_setaffinity, 0, before)
            yield


def _end(keeper: subprocess.Popen[bytes]) -> None:
    keeper.kill()
    keeper.communicate()


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
