"""Exposed communication: the time a program is held by its calls, waiting for peers told from transfer.

    wait     = from where the program is held to the last peer's arrival
    transfer = from there (or from where the program is held, if later) to where it goes on

What a call does while the program computes is not in it. A program is held in a blocking call, and in
a ``wait`` that Python sees; torch's own waits in C++ (the DDP reducer's) are seen by nobody and count as
compute, in the record and in the replay alike.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from ranklens_core.schema import Step
from ranklens_core.timing.arrival import ArrivalPlan
from ranklens_core.timing.ranklog import NO_TIME, Int64, RankLog


class Exposed(NamedTuple):
    """ns; ``estimated_ns`` is the part of the sum that calls with estimated times account for."""

    wait_ns: int = 0
    transfer_ns: int = 0
    estimated_ns: int = 0


class ExposedMeter:
    """Adds up how long the program was held, from any thread; ``take`` starts over."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._wait_ns = self._transfer_ns = self._estimated_ns = 0

    def add(self, begin_ns: int, ready_ns: int, end_ns: int, *, estimated: bool) -> None:
        """The program was held from ``begin_ns`` to ``end_ns``; all peers were there at ``ready_ns``."""
        wait_ns = max(0, min(ready_ns, end_ns) - begin_ns)
        with self._lock:
            self._wait_ns += wait_ns
            self._transfer_ns += end_ns - begin_ns - wait_ns
            if estimated:
                self._estimated_ns += end_ns - begin_ns

    def take(self) -> Exposed:
        """What came together since the last time."""
        with self._lock:
            taken = Exposed(self._wait_ns, self._transfer_ns, self._estimated_ns)
            self._wait_ns = self._transfer_ns = self._estimated_ns = 0
        return taken


def recorded_exposed(log: RankLog, plan: ArrivalPlan, steps: Sequence[Step]) -> Mapping[int, Exposed]:
    """The exposed communication of each recorded step.

    ``log`` is the rank's own, in its own clock as ``steps`` are; of ``plan`` only durations are used. A call
    without a recorded end is left out.
    """
    begin, end, ready = _held(log, plan)
    wait = np.clip(np.minimum(ready, end) - begin, 0, None)
    transfer = end - begin - wait
    found = {}
    for step in steps:
        inside = (begin >= step.begin_ns) & (begin < step.end_ns)
        found[step.index] = Exposed(int(wait[inside].sum()), int(transfer[inside].sum()))
    return found


def _held(log: RankLog, plan: ArrivalPlan) -> tuple[Int64, Int64, Int64]:
    """When the program was held, when it went on, and when the peers of the call were there, ns."""
    transfer = plan.transfer_ns[log.entry]
    timed = (log.end_ns != NO_TIME) & (transfer != NO_TIME)
    ready = np.where(timed, log.end_ns - np.where(timed, transfer, 0), NO_TIME)
    blocking = np.flatnonzero(log.blocking & timed)
    # a call that was over before the program waited for it held nobody
    awaited = log.wait_call
    waits = np.flatnonzero(timed[awaited] & (log.end_ns[awaited] > log.wait_begin_ns))
    return (
        np.concatenate([log.start_ns[blocking], log.wait_begin_ns[waits]]),
        np.concatenate([log.end_ns[blocking], log.wait_end_ns[waits]]),
        np.concatenate([ready[blocking], ready[awaited[waits]]]),
    )
