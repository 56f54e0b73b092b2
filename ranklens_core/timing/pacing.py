"""What paces the survivor's peers: when each would come to a call, told from the survivor's own times.

A peer's time is written as a *pace*: a maximum of terms, each a time of the survivor (it came to a
call, or a call of its ended) plus a lag. All terms but the tightest have slack, the time by which the
survivor's part of the job could be later without the peer being later. A peer's own compute
moves all terms; where it waits for somebody, the later of two paces is the maximum of both.
So what a peer owes to the survivor by way of third ranks is in its pace as well.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from ranklens_core.timing.binding import Binding
from ranklens_core.timing.join import MESSAGE_OPS, Joined, UnitRows
from ranklens_core.timing.ranklog import NO_TIME, Int64, RankLog

Pace = tuple[tuple[int, int], ...]
"""Terms (anchor, slack in ns). An anchor is ``2 * row`` for the end of the survivor's call in
``row``, ``2 * row + 1`` for when the survivor came to it. The least slack is 0."""

MAX_TERMS = 16
"""Terms kept of a pace, those with the least slack: the others matter only when the survivor's calls move
against each other by more than that."""


def latest(paces: Iterable[tuple[Pace, int]], max_terms: int) -> tuple[Pace, int]:
    """The pace of the last of several events, given with their recorded times, and that time."""
    paces = list(paces)
    if len(paces) == 1:
        return paces[0]
    last_ns = max(time_ns for _, time_ns in paces)
    slack: dict[int, int] = {}
    for pace, time_ns in paces:
        early_ns = last_ns - time_ns
        for anchor, own_slack in pace:
            if anchor not in slack or own_slack + early_ns < slack[anchor]:
                slack[anchor] = own_slack + early_ns
    terms = slack.items()
    if len(slack) > max_terms:
        terms = sorted(terms, key=lambda term: (term[1], term[0]))[:max_terms]  # type: ignore[assignment]
    return tuple(terms), last_ns


class Pacing:
    """Goes through the recording in the order of time and keeps every peer's pace.

    ``start_anchor`` is the survivor's first call: before they first have to do with the survivor, peers
    keep the recorded distance from it.
    """

    def __init__(self, joined: Joined, binding: Binding, survivor: int, max_terms: int = MAX_TERMS) -> None:
        self.max_terms = max_terms
        self._survivor = survivor
        self._rank: list[int] = joined.rank.tolist()
        self._start: list[int] = joined.start_ns.tolist()
        self._end: list[int] = joined.end_ns.tolist()
        self._unit: list[int] = joined.unit.tolist()
        self._exchange: list[int] = joined.exchange.tolist()
        self._members: list[int] = joined.members.tolist()
        self._offsets: list[int] = joined.offsets.tolist()
        self._binding = binding
        self._root: list[int] = binding.root.tolist()
        self._for_others: list[bool] = binding.waits_for_others.tolist()
        self._for_root: list[bool] = binding.waits_for_root.tolist()
        self._previous: list[int] = binding.previous.tolist()
        self._together: list[bool] = binding.together.tolist()
        self._unit_rows = UnitRows(joined)
        self._met: dict[int, tuple[Pace, int]] = {}
        self._ended: dict[int, tuple[Pace, int]] = {}
        self._observed: set[int] = set()
        self._queued: set[int] = set()
        self._arrival: dict[int, Pace] = {}
        own = joined.rows_of(survivor)
        self._survivor_row = {
            self._exchange[row]: row for row in range(own.start, own.stop) if joined.is_member[row]
        }
        self.start_anchor = 2 * self._unit[own.start] + 1 if own.stop > own.start else 1
        self._pace: dict[int, Pace] = {log.rank: ((self.start_anchor, 0),) for log in joined.logs}
        self._run(joined)

    def awaited(self, row: int) -> list[int]:
        """The rows that ``row`` waits for, without itself."""
        exchange = self._exchange[row]
        root = self._root[exchange]
        found = list(self._binding.waits_for_some.get(row, ()))
        if self._for_others[row]:
            members = self._members[self._offsets[exchange] : self._offsets[exchange + 1]]
            found += [member for member in members if member not in (row, root)]
        if self._for_root[row]:
            found.append(root)
        return found

    def _run(self, joined: Joined) -> None:
        parts = [
            _events(log, int(first))
            for log, first in zip(joined.logs, joined.row_of_rank, strict=False)
            if log.rank != self._survivor
        ]
        time, order_in_rank, unit, held_since = np.concatenate([np.zeros((4, 0), np.int64), *parts], axis=1)
        # of a rank's events in the same nanosecond the program's order decides; other ranks' are apart
        # by a transfer at least, where one depends on the other
        order = np.lexsort((unit, order_in_rank, time))
        is_issue = order_in_rank % 2 == 0
        rows = zip(is_issue[order].tolist(), unit[order].tolist(), held_since[order].tolist(), strict=True)
        for issues, row, held_since_ns in rows:
            if issues:
                self._issue(row)
            else:
                self._observe(row, held_since_ns)

    def _issue(self, unit: int) -> None:
        pace = self._pace[self._rank[unit]]
        for row in self._unit_rows(unit):
            self._arrival[row] = pace
            previous = self._previous[row]
            if previous >= 0 and self._unit[previous] not in self._observed:
                self._queued.add(row)

    def _observe(self, unit: int, held_since_ns: int) -> None:
        rank = self._rank[unit]
        before, ended = self._pace[rank], self._end_of(unit)
        if self._implied(unit, before, held_since_ns):
            self._pace[rank] = ended[0]
        else:
            self._pace[rank], _ = latest([(before, held_since_ns), ended], self.max_terms)
        self._observed.add(unit)

    def _implied(self, unit: int, before: Pace, held_since_ns: int) -> bool:
        """Whether that the call ended says all that the pace before it said.

        A call that all waited for ends at least its transfer after the rank came to it. So if the
        rank did nothing longer than that in between, its earlier pace cannot be the later one.
        """
        exchange = self._exchange[unit]
        if not (self._together[exchange] and before is self._arrival.get(unit)):
            return False
        ready_ns = max(self._ready_of(row)[1] for row in self._unit_rows(unit))
        transfer_ns = self._end[unit] - ready_ns
        return held_since_ns - self._start[unit] <= transfer_ns

    def _end_of(self, unit: int) -> tuple[Pace, int]:
        """The pace at which a peer's call ended, and its recorded end."""
        found = self._ended.get(unit)
        if found is None:
            pace, _ = latest([self._ready_of(row) for row in self._unit_rows(unit)], self.max_terms)
            found = self._ended[unit] = (pace, self._end[unit])
        return found

    def _ready_of(self, row: int) -> tuple[Pace, int]:
        """The pace at which all that a peer's row waited for had happened, and the recorded time of that."""
        exchange = self._exchange[row]
        if not self._together[exchange]:
            ready = self._latest_arrival([row, *self.awaited(row)])
        elif exchange in self._met:
            ready = self._met[exchange]
        else:
            members = self._members[self._offsets[exchange] : self._offsets[exchange + 1]]
            ready = self._met[exchange] = self._meeting(exchange, members)
        if row in self._queued and not self._queue_is_the_survivors(exchange, self._previous[row]):
            return latest([ready, self._end_of(self._unit[self._previous[row]])], self.max_terms)
        return ready

    def _meeting(self, exchange: int, members: list[int]) -> tuple[Pace, int]:
        """Of an exchange whose members all waited for each other: it ends for all as it does for one."""
        own = self._survivor_row.get(exchange)
        if own is None or len(self._unit_rows(self._unit[own])) > 1:
            return self._latest_arrival(members)
        return ((2 * self._unit[own], 0),), max(self._start[member] for member in members)

    def _latest_arrival(self, rows: list[int]) -> tuple[Pace, int]:
        return latest([(self.arrival_of(row), self._start[row]) for row in rows], self.max_terms)

    def arrival_of(self, row: int) -> Pace:
        """The pace at which a rank came to the call in ``row``."""
        if self._rank[row] == self._survivor:
            return ((2 * self._unit[row] + 1, 0),)
        # two events at the same nanosecond: that the rank is there now is what its pace says
        return self._arrival.get(row) or self._pace[self._rank[row]]

    def _queue_is_the_survivors(self, exchange: int, previous: int) -> bool:
        """Whether the end of the survivor's call tells of the previous call's end too."""
        before = self._exchange[previous]
        return self._together[exchange] and self._together[before] and exchange in self._survivor_row


def _events(log: RankLog, first_row: int) -> Int64:
    """What a peer did, (4, events): time, order, unit and since when it was held.

    The order is twice the entry where it came to the unit, twice the entry plus one where it first
    knew that the unit had ended.
    """
    units = np.flatnonzero(log.unit == np.arange(len(log.unit)))
    start, end, entry = log.start_ns[units], log.end_ns[units], log.entry[units]
    held_since = np.where(log.blocking, log.start_ns, NO_TIME)
    first_wait = log.wait_call[::-1]  # of several waits for a call the first is written last
    held_since[log.unit[first_wait]] = log.wait_begin_ns[::-1]
    held_since = held_since[units]
    # a collective that the program was never seen to wait for is taken to be known when it ends: it
    # was waited for out of our sight (by the DDP reducer, by a stream). A message may be nobody's.
    is_message = np.array([s.op in MESSAGE_OPS for s in log.signatures], bool)[log.signature[units]]
    held_since = np.where((held_since == NO_TIME) & ~is_message, end, held_since)
    seen = (end != NO_TIME) & (held_since != NO_TIME)
    observed = log.observed_at()[units]
    comes = np.stack([start, 2 * entry, units + first_row, start])
    ends = np.stack([np.maximum(end, held_since), 2 * observed + 1, units + first_row, held_since])
    return np.concatenate([comes, ends[:, seen]], axis=1)
