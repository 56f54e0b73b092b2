"""The whole job in simulated time: when every rank comes to every entry, and every call ends.

One event simulation: a heap of (time, insertion number), integer nanoseconds, no randomness. A call
ends ``transfer`` after the last rank it waits for came to it, and, where a group's collectives run
one after the other, not before the previous one ended.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ranklens_core.errors import TraceError
from ranklens_core.timing.binding import Binding
from ranklens_core.timing.join import Joined, UnitRows
from ranklens_core.timing.ranklog import NO_TIME, Bool, Int64
from ranklens_core.timing.schedule import Schedule

OWN = -1
"""``Simulation.cause`` of a call that waited for nobody: its own rank came last."""


@dataclass(frozen=True)
class Simulation:
    """What a simulation found; int64 ns.

    Over rows of ``joined`` (of a batch: its last call): ``start_ns`` when the rank came to the
    call, ``ready_ns`` when the last of those it waited for had come, ``end_ns``. ``cause`` is the
    row it waited for longest (a peer's, or the previous call of the group), ``OWN`` if none;
    ``queued`` (bool) says it was that previous call. Over the entries of ``schedules[i]``:
    ``begin_ns[i]`` and ``release_ns[i]``, when the rank came to the entry and could go on.
    """

    joined: Joined
    schedules: tuple[Schedule, ...]
    start_ns: Int64
    ready_ns: Int64
    end_ns: Int64
    cause: Int64
    queued: Bool
    begin_ns: tuple[Int64, ...]
    release_ns: tuple[Int64, ...]

    def time_of(self, place: int, recorded_ns: int) -> int:
        """The simulated time of a recorded time of ``schedules[place]``.

        Between two entries compute is taken to pass evenly; before the first and after the last
        entry it passes as recorded.
        """
        schedule, begin, release = self.schedules[place], self.begin_ns[place], self.release_ns[place]
        if not len(schedule.entry):
            return schedule.begin_ns
        # a rank's log may overlap itself where several of its threads communicate
        released = np.maximum.accumulate(schedule.released_ns)
        after = int(np.searchsorted(released, recorded_ns, side="right"))
        if after == 0:
            return int(begin[0] - max(schedule.recorded_ns[0] - recorded_ns, 0))
        since = recorded_ns - int(released[after - 1])
        if after < len(released):
            recorded_gap = int(schedule.recorded_ns[after]) - int(released[after - 1])
            gap = int(begin[after] - release[after - 1])
            since = gap if since >= recorded_gap else since * gap // recorded_gap
        return int(release[after - 1]) + since


def simulate(
    joined: Joined, binding: Binding, schedules: Sequence[Schedule], transfer_ns: Int64
) -> Simulation:
    """Run all ranks.

    ``transfer_ns``: over rows, from the last arrival waited for to the row's end; a batch is over
    when all its rows are. A member that was not recorded is not waited for.

    Raises TraceError where ranks wait for each other for ever, saying who waits for whom.
    """
    ordered = tuple(sorted(schedules, key=lambda schedule: schedule.rank))
    engine = _Engine(joined, binding, ordered, transfer_ns)
    engine.run()
    return engine.result()


class _Engine:
    """The state of a simulation; lists, as Python reads them faster than arrays."""

    def __init__(
        self, joined: Joined, binding: Binding, schedules: tuple[Schedule, ...], transfer_ns: Int64
    ) -> None:
        self.joined = joined
        self.schedules = schedules
        self.transfer_ns = transfer_ns.tolist()
        rows = len(joined.rank)
        self.exchange: list[int] = joined.exchange.tolist()
        self.unit: list[int] = joined.unit.tolist()
        self.root: list[int] = binding.root.tolist()
        self.for_others: list[bool] = binding.waits_for_others.tolist()
        self.for_root: list[bool] = binding.waits_for_root.tolist()
        self.for_some = binding.waits_for_some
        self.waited_by: dict[int, list[int]] = {}
        for row, others in self.for_some.items():
            for other in others:
                self.waited_by.setdefault(other, []).append(row)
        self.previous: list[int] = binding.previous.tolist()
        self.next = _inverse(binding.previous).tolist()
        self.offsets: list[int] = joined.offsets.tolist()
        self.members: list[int] = joined.members.tolist()
        self.rows_of_unit = UnitRows(joined)
        sizes = np.diff(joined.offsets)
        self.others_left: list[int] = (sizes - (binding.root >= 0)).tolist()
        self.latest: list[int] = [OWN] * joined.n_exchanges
        self.unmet: list[int] = _unmet(joined, binding)
        self.start: list[int] = [NO_TIME] * rows
        self.ready: list[int] = [NO_TIME] * rows
        self.end: list[int] = [NO_TIME] * rows
        self.cause: list[int] = [OWN] * rows
        self.queued = [False] * rows
        self.held: dict[int, list[tuple[int, int]]] = {}
        self.heap: list[tuple[int, int, int]] = []
        self.pushed = 0
        self.place = [0] * len(schedules)
        self.begin: list[list[int]] = [[] for _ in schedules]
        self.release: list[list[int]] = [[] for _ in schedules]
        self.columns = [
            (s.row.tolist(), s.issues.tolist(), s.holds.tolist(), s.own_ns.tolist()) for s in schedules
        ]

    def run(self) -> None:
        for number, schedule in enumerate(self.schedules):
            self._go_on(number, schedule.begin_ns)
        while self.heap:
            now_ns, _, number = heapq.heappop(self.heap)
            self._come(number, now_ns)
        if self.held:
            raise TraceError(self._deadlock())

    def result(self) -> Simulation:
        return Simulation(
            joined=self.joined,
            schedules=self.schedules,
            start_ns=np.array(self.start, np.int64),
            ready_ns=np.array(self.ready, np.int64),
            end_ns=np.array(self.end, np.int64),
            cause=np.array(self.cause, np.int64),
            queued=np.array(self.queued, np.bool_),
            begin_ns=tuple(np.array(times, np.int64) for times in self.begin),
            release_ns=tuple(np.array(times, np.int64) for times in self.release),
        )

    def _go_on(self, number: int, now_ns: int) -> None:
        """The rank computes until it comes to its next entry."""
        place, own_ns = self.place[number], self.columns[number][3]
        if place < len(own_ns):
            self.pushed += 1
            heapq.heappush(self.heap, (now_ns + own_ns[place], self.pushed, number))

    def _come(self, number: int, now_ns: int) -> None:
        """The rank comes to its entry."""
        place = self.place[number]
        rows, issues, holds, _ = self.columns[number]
        unit = rows[place]
        self.begin[number].append(now_ns)
        if issues[place]:
            self._arrive(unit, now_ns)
        if holds[place] and self.end[unit] == NO_TIME:
            self.held.setdefault(unit, []).append((number, now_ns))
            return
        self._release(number, max(now_ns, self.end[unit]) if holds[place] else now_ns)

    def _release(self, number: int, now_ns: int) -> None:
        self.release[number].append(now_ns)
        self.place[number] += 1
        self._go_on(number, now_ns)

    def _arrive(self, unit: int, now_ns: int) -> None:
        for row in self.rows_of_unit(unit):
            self.start[row] = now_ns
            exchange = self.exchange[row]
            members = self.members[self.offsets[exchange] : self.offsets[exchange + 1]]
            if row == self.root[exchange]:
                for member in members:
                    if self.for_root[member]:
                        self._meet(member)
            else:
                self.others_left[exchange] -= 1
                self.latest[exchange] = row
                if self.others_left[exchange] == 0:
                    for member in members:
                        if self.for_others[member]:
                            self._meet(member)
            for waiter in self.waited_by.get(row, ()):
                self._meet(waiter)
        self._meet(unit)

    def _meet(self, row: int) -> None:
        """One thing that the row's unit waited for has happened."""
        unit = self.unit[row]
        self.unmet[unit] -= 1
        if self.unmet[unit] == 0:
            self._complete(unit)

    def _complete(self, unit: int) -> None:
        unit_end = NO_TIME
        rows = self.rows_of_unit(unit)
        for row in rows:
            ready, cause = self._ready(row)
            end = ready + self.transfer_ns[row]
            if end > unit_end:
                unit_end = end
                self.ready[unit], self.cause[unit] = ready, cause
                self.queued[unit] = cause != OWN and cause == self.previous[row]
        for row in rows:
            self.end[row] = unit_end
        self.end[unit] = unit_end
        for number, since_ns in self.held.pop(unit, ()):
            self._release(number, max(since_ns, unit_end))
        for row in rows:
            if self.next[row] >= 0:
                self._meet(self.next[row])

    def _ready(self, row: int) -> tuple[int, int]:
        """When all that the row waited for had happened, and which row was last."""
        ready, cause = self.start[row], OWN
        exchange = self.exchange[row]
        others = self.latest[exchange] if self.for_others[row] else OWN
        root = self.root[exchange] if self.for_root[row] else OWN
        for other in (others, root, *self.for_some.get(row, ())):
            if other != OWN and self.start[other] > ready:
                ready, cause = self.start[other], other
        previous = self.previous[row]
        if previous >= 0 and self.end[previous] > ready:
            ready, cause = self.end[previous], previous
        return ready, cause

    def _deadlock(self) -> str:
        lines = []
        for unit, waiting in sorted(self.held.items()):
            for number, _ in waiting:
                entry = self.schedules[number].entry[self.place[number]]
                call = self.joined.signature(unit)
                absent = sorted({int(self.joined.rank[row]) for row in self._awaited(unit)})
                lines.append(
                    f"rank {self.schedules[number].rank}, entry {entry}: {call.op} on group {call.group} "
                    f"waits for {', '.join(f'rank {rank}' for rank in absent) or 'an earlier call'}"
                )
        more = f"\n  and {len(lines) - 16} more" if len(lines) > 16 else ""
        return (
            "The recorded calls wait for each other for ever:\n  "
            + "\n  ".join(lines[:16])
            + more
            + "\nThe job hung there, or the recording misses calls; see ranklens verify."
        )

    def _awaited(self, unit: int) -> list[int]:
        """Rows of peers that ``unit`` waits for and that have not come."""
        found = []
        for row in self.rows_of_unit(unit):
            exchange = self.exchange[row]
            for member in self.members[self.offsets[exchange] : self.offsets[exchange + 1]]:
                is_root = member == self.root[exchange]
                waits = self.for_root[row] if is_root else self.for_others[row]
                waits |= member in self.for_some.get(row, ())
                if waits and member != row and self.start[member] == NO_TIME:
                    found.append(member)
        return found


def _unmet(joined: Joined, binding: Binding) -> list[int]:
    """For each unit how many things must happen before it can end, its own start being one."""
    unmet = np.zeros(len(joined.rank), np.int64)
    np.add.at(unmet, joined.unit, binding.waits_for_others)
    np.add.at(unmet, joined.unit, binding.waits_for_root)
    np.add.at(unmet, joined.unit, binding.previous >= 0)
    for row, others in binding.waits_for_some.items():
        unmet[joined.unit[row]] += len(others)
    return [int(count) for count in unmet + 1]


def _inverse(previous: Int64) -> Int64:
    """For each row the row whose previous one it is, else -1."""
    following = np.full(len(previous), -1, np.int64)
    rows = np.flatnonzero(previous >= 0)
    following[previous[rows]] = rows
    return following
