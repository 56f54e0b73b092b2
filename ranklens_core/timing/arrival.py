"""Recorded timing: when the survivor's calls end on replay, computed from its own replayed times.

    completion = max(own arrival, each peer's arrival) + transfer
    a peer's arrival = max over its terms of (a time of the survivor, replayed) + lag

The terms come from ``pacing``; those of all peers of a call become one list, for each anchor the
largest lag. At the recorded pace every call ends exactly at its recorded time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ranklens_core.errors import TraceIncompleteError
from ranklens_core.timing.binding import Binding, recorded_transfers
from ranklens_core.timing.join import Joined, UnitRows
from ranklens_core.timing.pacing import MAX_TERMS, Pace, Pacing, latest
from ranklens_core.timing.ranklog import NO_TIME, Int64, RankLog

NO_LIMIT = 1 << 62


class Basis(IntEnum):
    """What the time of a call rests on."""

    NOT_A_CALL = 0
    RECORDED = 1
    """All ranks of the call were recorded."""
    PEERS_ASSUMED_BINDING = 2
    """Some were not: they are taken to have come last, as late as the call's end allows."""
    NOT_COMPLETED = 3
    """It did not end in the recording: there is no time."""


class Anchor(NamedTuple):
    """A time of the survivor that a call's completion depends on: when it came to ``entry``
    (``completed`` false) or when that call ended; the peers are there ``lag_ns`` later."""

    entry: int
    completed: bool
    lag_ns: int


@dataclass(frozen=True)
class ArrivalPlan:
    """The recorded timing of one rank's calls, arrays over its entries (int64, ns).

    ``unit`` is the entry that stands for a call's coalescing batch, the last call of it (-1 for
    waits); the other columns are the same in all entries of a batch. ``start_ns`` and ``end_ns`` are
    as recorded, ``last_peer_ns`` when the last of the peers it waited for came (``NO_TIME`` if it
    waited for nobody), ``transfer_ns`` from the last arrival to the end, ``wait_ns`` from the own
    arrival to the last peer's. ``basis`` (int8) is a ``Basis``. The anchors of entry ``e`` are
    ``anchor_offsets[e]`` to ``[e + 1]`` of ``anchor_entry``, ``anchor_completed`` (bool) and
    ``anchor_lag_ns``.
    """

    rank: int
    unit: Int64
    start_ns: Int64
    end_ns: Int64
    last_peer_ns: Int64
    transfer_ns: Int64
    wait_ns: Int64
    basis: npt.NDArray[np.int8]
    anchor_offsets: Int64
    anchor_entry: Int64
    anchor_completed: npt.NDArray[np.bool_]
    anchor_lag_ns: Int64


class ArrivalTimer:
    """When a call of the survivor is due, for the replayer: integer ns, no state, thread safe."""

    def __init__(self, plan: ArrivalPlan) -> None:
        self.rank = plan.rank
        self._transfer_ns: list[int] = plan.transfer_ns.tolist()
        self._basis: list[int] = plan.basis.tolist()
        columns = (plan.anchor_entry.tolist(), plan.anchor_completed.tolist(), plan.anchor_lag_ns.tolist())
        anchors = [Anchor(*values) for values in zip(*columns, strict=True)]
        offsets = plan.anchor_offsets.tolist()
        self._anchors = [tuple(anchors[begin:end]) for begin, end in pairwise(offsets)]

    def anchors(self, entry: int) -> tuple[Anchor, ...]:
        """What must be known before the call recorded as ``entry`` has a due time.

        An anchor may be a later entry than ``entry``: a peer came to this call only after another one,
        which the survivor issues while this one is in flight. None is issued after the program has
        waited for this one. ``entry`` itself may be an anchor, but only by its arrival.
        """
        return self._anchors[entry]

    def basis(self, entry: int) -> Basis:
        """What the due time of ``entry`` rests on."""
        return Basis(self._basis[entry])

    def transfer_ns(self, entry: int) -> int:
        """How long the transfer of ``entry`` took, from the last arrival to the end."""
        return self._transfer_ns[entry]

    def due_ns(
        self,
        entry: int,
        own_arrival_ns: int,
        completed_ns: Callable[[int], int],
        arrived_ns: Callable[[int], int],
    ) -> int:
        """When the call recorded as ``entry`` ends, in the clock of ``own_arrival_ns``.

        ``completed_ns(e)`` is the due time of the call recorded as ``e`` (it may lie in the future),
        ``arrived_ns(e)`` when the survivor came to it on replay; they are asked for ``anchors(entry)``.
        Of a batch, ``entry`` may be any call and ``own_arrival_ns`` is the last call's.

        Raises TraceIncompleteError where the recorded call did not end.
        """
        if self._basis[entry] not in (Basis.RECORDED, Basis.PEERS_ASSUMED_BINDING):
            raise TraceIncompleteError(
                f"entry {entry} of rank {self.rank} did not end in the recording: it has no time. "
                "Record again, or replay with estimated times."
            )
        ready_ns = own_arrival_ns
        for anchor, completed, lag_ns in self._anchors[entry]:
            at_ns = (completed_ns if completed else arrived_ns)(anchor) + lag_ns
            if at_ns > ready_ns:
                ready_ns = at_ns
        return ready_ns + self._transfer_ns[entry]


def plan_arrivals(
    joined: Joined, binding: Binding, survivor: int, *, max_terms: int = MAX_TERMS
) -> ArrivalPlan:
    """The recorded timing of ``survivor``; clocks must have been aligned.

    ``max_terms`` bounds the anchors kept for each peer. Raises KeyError if it was not recorded.
    """
    places = [place for place, log in enumerate(joined.logs) if log.rank == survivor]
    if not places:
        raise KeyError(survivor)
    log, first = joined.logs[places[0]], int(joined.row_of_rank[places[0]])
    peers = _Peers(joined, binding, survivor, max_terms)
    entries, units = log.next_entry, (log.unit + first)
    basis = np.full(entries, Basis.NOT_A_CALL, np.int8)
    columns = {name: np.full(entries, NO_TIME, np.int64) for name in ("last_peer", "transfer")}
    anchors: list[list[Anchor]] = [[] for _ in range(entries)]
    timings: dict[int, _Timing] = {}
    for entry, unit in zip(log.entry.tolist(), units.tolist(), strict=True):
        if unit not in timings:
            timings[unit] = peers.timing(unit)
        timing = timings[unit]
        basis[entry], anchors[entry] = timing.basis, timing.anchors
        columns["last_peer"][entry], columns["transfer"][entry] = timing.last_peer_ns, timing.transfer_ns
    flat = [anchor for of_entry in anchors for anchor in of_entry]
    start_ns = _by_entry(log, log.start_ns, NO_TIME)
    waited = columns["last_peer"] > start_ns
    return ArrivalPlan(
        rank=survivor,
        unit=_by_entry(log, log.entry[log.unit], -1),
        start_ns=start_ns,
        end_ns=_by_entry(log, log.end_ns, NO_TIME),
        last_peer_ns=columns["last_peer"],
        transfer_ns=columns["transfer"],
        wait_ns=np.where(waited, columns["last_peer"] - start_ns, 0),
        basis=basis,
        anchor_offsets=np.cumsum([0, *map(len, anchors)], dtype=np.int64),
        anchor_entry=np.array([anchor.entry for anchor in flat], np.int64),
        anchor_completed=np.array([anchor.completed for anchor in flat], np.bool_),
        anchor_lag_ns=np.array([anchor.lag_ns for anchor in flat], np.int64),
    )


def _by_entry(log: RankLog, of_calls: Int64, otherwise: int) -> Int64:
    values = np.full(log.next_entry, otherwise, np.int64)
    values[log.entry] = of_calls
    return values


@dataclass(frozen=True)
class _Timing:
    basis: Basis
    anchors: list[Anchor]
    last_peer_ns: int
    transfer_ns: int


class _Peers:
    """Says for each unit of the survivor who it waited for, and what paced them."""

    def __init__(self, joined: Joined, binding: Binding, survivor: int, max_terms: int) -> None:
        self._joined = joined
        self._previous = binding.previous
        self._pacing = Pacing(joined, binding, survivor, max_terms)
        self._unit_rows = UnitRows(joined)
        self._transfer_ns = recorded_transfers(joined, binding)
        self._unseen = _UnseenRanks(joined, survivor)

    def timing(self, unit: int) -> _Timing:
        joined = self._joined
        end_ns = int(joined.end_ns[unit])
        if end_ns == NO_TIME:
            return _Timing(Basis.NOT_COMPLETED, [], NO_TIME, NO_TIME)
        transfer_ns, basis = int(self._transfer_ns[unit]), Basis.RECORDED
        rows = self._unit_rows(unit)
        arrivals = [
            (self._pacing.arrival_of(peer), int(joined.start_ns[peer]))
            for row in rows
            for peer in self._pacing.awaited(row)
        ]
        if unit in self._unseen:
            pace, came_ns = self._unseen.arrival(unit, self._pacing.start_anchor)
            arrivals.append((pace, came_ns))
            transfer_ns, basis = min(transfer_ns, end_ns - came_ns), Basis.PEERS_ASSUMED_BINDING
        last_peer_ns = max((time_ns for _, time_ns in arrivals), default=NO_TIME)
        for row in rows:
            previous = int(self._previous[row])
            if previous >= 0:
                queue = int(joined.unit[previous])
                arrivals.append((((2 * queue, 0),), int(joined.end_ns[queue])))
        return _Timing(basis, self._anchors(arrivals), last_peer_ns, transfer_ns)

    def _anchors(self, arrivals: list[tuple[Pace, int]]) -> list[Anchor]:
        if not arrivals:
            return []
        joined = self._joined
        pace, last_ns = latest(arrivals, NO_LIMIT)
        anchors = []
        for anchor, slack_ns in pace:
            row, came = divmod(anchor, 2)
            recorded_ns = int((joined.start_ns if came else joined.end_ns)[row])
            anchors.append(Anchor(int(joined.entry[row]), not came, last_ns - slack_ns - recorded_ns))
        return sorted(anchors)


class _UnseenRanks:
    """The ranks that were not recorded, as one: they follow the survivor's calls with them.

    When they came to a call is not known. They are assumed to have come last: its end less the
    shortest that any call of this signature took, which is what the transfer can have been at most.
    """

    def __init__(self, joined: Joined, survivor: int) -> None:
        rows = joined.rows_of(survivor)
        own = np.arange(rows.start, rows.stop)
        log = next(log for log in joined.logs if log.rank == survivor)
        self._start, self._end, self._first = log.start_ns, log.end_ns, rows.start
        took = np.where(log.end_ns == NO_TIME, np.iinfo(np.int64).max, log.end_ns - log.start_ns)
        fastest = np.full(len(log.signatures), np.iinfo(np.int64).max, np.int64)
        np.minimum.at(fastest, log.signature, took)
        self._fastest = fastest[log.signature]
        missing = own[joined.missing[joined.exchange[own]] > 0]
        self._units = np.unique(joined.unit[missing])
        self._units = self._units[joined.end_ns[self._units] != NO_TIME]
        self._units = self._units[np.argsort(joined.end_ns[self._units], kind="stable")]
        self._ends = joined.end_ns[self._units]
        self._known = frozenset(self._units.tolist())

    def __contains__(self, unit: int) -> bool:
        return unit in self._known

    def arrival(self, unit: int, start_anchor: int) -> tuple[Pace, int]:
        """Their assumed arrival at ``unit``: after the last of their calls that had ended by then."""
        call = unit - self._first
        came_ns = int(self._end[call] - self._fastest[call])
        before = int(np.searchsorted(self._ends, came_ns, side="right")) - 1
        if before >= 0 and self._units[before] == unit:
            before -= 1
        return (((2 * int(self._units[before]) if before >= 0 else start_anchor), 0),), came_ns
