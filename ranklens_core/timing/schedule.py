"""What a rank did in order, as the simulator runs it: own compute, then a call or a wait, and so on."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from ranklens_core.timing.join import Joined
from ranklens_core.timing.ranklog import NO_TIME, Bool, Int64, RankLog


class Compute(StrEnum):
    """What counts as a rank's own compute between two entries."""

    ELAPSED = "elapsed"
    """All time it was not held by communication, RankLens' and the backend's own work included:
    simulated with the recorded transfers this gives the recorded times exactly."""
    WALL = "wall"
    """The program's own wall time (``compute_ns``)."""
    CPU = "cpu"
    """The program's own CPU time (``compute_cpu_ns``): what it would take with a core of its own."""


@dataclass(frozen=True)
class Schedule:
    """One rank's entries in order, arrays of one length, int64 unless said otherwise.

    Before entry ``i`` the rank computes ``own_ns[i]``; ``row`` (of the ``Joined``) is the call it makes
    or waits for. ``issues`` (bool): the entry starts the call's unit, which the last call of a batch
    does. ``holds`` (bool): the rank goes on when the unit is over. ``recorded_ns`` and
    ``released_ns`` are when the recorded rank came to the entry and when it could go on.
    ``begin_ns`` is when the rank starts to compute.
    """

    rank: int
    begin_ns: int
    entry: Int64
    row: Int64
    issues: Bool
    holds: Bool
    own_ns: Int64
    recorded_ns: Int64
    released_ns: Int64

    def scaled(self, factor: float) -> Schedule:
        """This rank with its own compute times ``factor`` (> 0), rounded to ns."""
        return dataclasses.replace(self, own_ns=np.rint(self.own_ns * factor).astype(np.int64))


def schedules(
    joined: Joined, compute: Compute, compute_of: Mapping[int, Compute] | None = None
) -> list[Schedule]:
    """The schedule of every rank of ``joined``; ``compute_of`` are ranks with another measure (of a core of
    their own: ``WALL``).

    With ``ELAPSED`` ranks begin where their recordings did, relative to the first of them; else all
    begin together, at 0.
    """
    made = [
        _schedule(joined, log, int(first), (compute_of or {}).get(log.rank, compute))
        for log, first in zip(joined.logs, joined.row_of_rank, strict=False)
    ]
    if compute is not Compute.ELAPSED:
        return made
    firsts = [int(schedule.recorded_ns[0]) for schedule in made if len(schedule.entry)]
    origin_ns = min(firsts, default=0)
    return [
        dataclasses.replace(schedule, begin_ns=int(schedule.recorded_ns[0]) - origin_ns)
        if len(schedule.entry)
        else schedule
        for schedule in made
    ]


def _schedule(joined: Joined, log: RankLog, first_row: int, compute: Compute) -> Schedule:
    calls, waits = len(log.entry), len(log.wait_entry)
    order = np.argsort(np.concatenate([log.entry, log.wait_entry]), kind="stable")
    is_wait = order >= calls
    call = np.where(is_wait, np.append(log.wait_call, 0)[np.clip(order - calls, 0, waits)], order)
    row = joined.unit[call + first_row] if calls else call
    recorded = np.concatenate([log.start_ns, log.wait_begin_ns])[order]
    end = joined.end_ns[row] if calls else recorded
    blocking = log.blocking[call] & (log.unit[call] == call) if calls else is_wait
    holds = (is_wait | blocking) & (end != NO_TIME)
    released = np.where(holds, np.maximum(recorded, end), recorded)
    if compute is Compute.ELAPSED:
        own = np.maximum(recorded - np.append(recorded[:1], released[:-1]), 0)
    else:
        name = "compute_ns" if compute is Compute.WALL else "compute_cpu_ns"
        own = np.concatenate([getattr(log, name), getattr(log, f"wait_{name}")])[order]
    return Schedule(
        rank=log.rank,
        begin_ns=0,
        entry=np.concatenate([log.entry, log.wait_entry])[order],
        row=row,
        issues=~is_wait & (row == call + first_row),
        holds=holds,
        own_ns=own,
        recorded_ns=recorded,
        released_ns=released,
    )
