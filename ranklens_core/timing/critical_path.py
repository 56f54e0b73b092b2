"""What a simulated job's duration is made of: the chain of compute and transfers with no slack."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from ranklens_core.timing.simulate import OWN, Simulation


class SpanKind(StrEnum):
    """What the job's end was waiting for."""

    COMPUTE = "compute"
    TRANSFER = "transfer"


@dataclass(frozen=True)
class Span:
    """A piece of the path: ``rank`` computed until it came to ``entry``, or its call ``entry`` was
    transferred, everybody it waited for being there; ns of the simulation."""

    rank: int
    kind: SpanKind
    entry: int
    begin_ns: int
    end_ns: int


def critical_path(simulation: Simulation) -> tuple[Span, ...]:
    """The path from the job's beginning to its end, in the order of time, without gaps.

    It ends with the last entry of the rank that finishes last; time after that entry is not in it.
    Spans of no duration are left out. Empty for a job without entries.
    """
    return _Walk(simulation).spans()


def share_ns(path: tuple[Span, ...]) -> Counter[tuple[int, SpanKind]]:
    """How long the path stays with each rank and kind, in ns."""
    total: Counter[tuple[int, SpanKind]] = Counter()
    for span in path:
        total[span.rank, span.kind] += span.end_ns - span.begin_ns
    return total


class _Walk:
    """Goes back from the end."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._issued_at = {
            int(schedule.row[index]): (place, int(index))
            for place, schedule in enumerate(simulation.schedules)
            for index in np.flatnonzero(schedule.issues)
        }
        self._spans: list[Span] = []

    def spans(self) -> tuple[Span, ...]:
        simulation = self._simulation
        ends = [(int(times[-1]), -place) for place, times in enumerate(simulation.release_ns) if len(times)]
        if not ends:
            return ()
        place = -max(ends)[1]
        index = len(simulation.release_ns[place]) - 1
        while index >= 0:
            if simulation.release_ns[place][index] > simulation.begin_ns[place][index]:
                place, index = self._back_over_transfers(int(simulation.schedules[place].row[index]))
            index = self._back_over_compute(place, index)
        return tuple(reversed(self._spans))

    def _back_over_transfers(self, unit: int) -> tuple[int, int]:
        """From the end of a call to where the last one it waited for came: schedule and entry's index."""
        simulation = self._simulation
        while True:
            ready_ns, end_ns = int(simulation.ready_ns[unit]), int(simulation.end_ns[unit])
            rank, entry = int(simulation.joined.rank[unit]), int(simulation.joined.entry[unit])
            self._add(rank, SpanKind.TRANSFER, entry, ready_ns, end_ns)
            cause = int(simulation.cause[unit])
            came = unit if cause == OWN else int(simulation.joined.unit[cause])
            if not simulation.queued[unit]:
                return self._issued_at[came]
            unit = came

    def _back_over_compute(self, place: int, index: int) -> int:
        """Over the compute before an entry; the index of the entry before."""
        simulation, schedule = self._simulation, self._simulation.schedules[place]
        began_ns = int(simulation.release_ns[place][index - 1]) if index else schedule.begin_ns
        end_ns = int(simulation.begin_ns[place][index])
        self._add(schedule.rank, SpanKind.COMPUTE, int(schedule.entry[index]), began_ns, end_ns)
        return index - 1

    def _add(self, rank: int, kind: SpanKind, entry: int, begin_ns: int, end_ns: int) -> None:
        if end_ns > begin_ns:
            self._spans.append(Span(rank, kind, entry, begin_ns, end_ns))
