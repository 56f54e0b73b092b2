"""From a job to its diagnosis: what is wrong, who began it, who waits for whom."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import numpy as np

from ranklens_core.diagnose.answer import Answer, short_site
from ranklens_core.diagnose.disagreement import Split, first_split, message_splits
from ranklens_core.diagnose.findings import (
    DIAGNOSIS_VERSION,
    Deviation,
    Diagnosis,
    Disagreement,
    Party,
    Wait,
)
from ranklens_core.diagnose.job import Job
from ranklens_core.diagnose.lag import Lag, find_lag
from ranklens_core.diagnose.replicas import Odd, Replicas
from ranklens_core.diagnose.sequences import NO_ROW, GroupSequence, Sequences
from ranklens_core.diagnose.straggler import stragglers
from ranklens_core.diagnose.view import call_view, end_view
from ranklens_core.diagnose.waiting import Blocked, Edge, circle_of, distances, ends
from ranklens_core.timing.ranklog import NO_TIME


def diagnose_job(job: Job, path: str) -> Diagnosis:
    """Everything that is found in ``job``, which was read from ``path``."""
    return _Examination(job).diagnosis(path)


class _Examination:
    """One job under examination; each method fills one part of the diagnosis."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._sequences = Sequences(job)
        self._groups = {sequence.key: sequence for sequence in self._sequences.groups()}
        found = (first_split(job, self._sequences, sequence) for sequence in self._groups.values())
        splits = [split for split in found if split is not None] + message_splits(job)
        self._splits = sorted(splits, key=self._start_ns)
        self._blocked = Blocked(job, self._sequences, self._groups, self._splits)

    def diagnosis(self, path: str) -> Diagnosis:
        job = self._job
        disagreements = tuple(self._disagreement(split) for split in self._splits)
        certain = [edge for edge in self._blocked.edges if edge.certain]
        # what is only likely counts where nothing is certain
        likely = [edge for edge in self._blocked.edges if edge.likely]
        edges = certain if certain or disagreements else likely
        found = ends(edges)
        waits = self._waits(edges, [rank for end in found for rank in end.ranks])
        circle = next((end.ranks for end in found if len(end.ranks) > 1), ())
        cycle = circle_of(edges, circle) if circle else ()
        replicas = Replicas(job)
        odd_values = replicas.odd_ones(self._groups.values(), self._sequences.agreed)
        values = tuple(self._deviation(odd) for odd in odd_values)
        all_ends = tuple(end_view(job, state) for state in job.states.values())
        lagging = self._lagging([rank for end in found for rank in end.ranks], edges)
        answer = Answer(
            disagreements=disagreements,
            waits=waits,
            ends=all_ends,
            last=tuple(found),
            cycle=cycle,
            stalled=self._stalled(),
            lag=lagging,
            values=values,
            compared=replicas.compared,
        )
        return Diagnosis(
            version=DIAGNOSIS_VERSION,
            path=path,
            source=job.source,
            world_size=job.world_size,
            status=answer.status,
            answer=answer.text,
            culprits=answer.culprits,
            disagreements=disagreements,
            waits=waits,
            cycle=cycle,
            ends=all_ends,
            values=values,
            values_compared=replicas.compared,
            stragglers=stragglers(job, self._sequences.step),
            times=job.times,
            notes=job.notes,
        )

    def _start_ns(self, split: Split) -> int:
        return min(int(self._job.joined.start_ns[row]) for party in split.parties for row in party)

    def _disagreement(self, split: Split) -> Disagreement:
        job, rows = self._job, [row for party in split.parties for row in party]
        first = call_view(job, rows[0])
        return Disagreement(
            group=first.group,
            role=first.role,
            seq_id=first.seq_id,
            step=first.step,
            fields=split.fields,
            parties=tuple(
                Party(ranks=tuple(int(job.joined.rank[row]) for row in party), call=call_view(job, party[0]))
                for party in split.parties
            ),
            odd=split.odd,
            lag=self._lag_of(split),
            completed=all(int(job.joined.end_ns[row]) != NO_TIME for row in rows),
            start_ns=self._start_ns(split),
        )

    def _lag_of(self, split: Split) -> str:
        if split.sequence is None or split.column is None or not split.odd:
            return ""
        other = int(self._job.joined.rank[split.parties[0][0]])
        return self._lag_words(split.sequence, split.odd[0], other, split.column)

    def _lag_words(self, sequence: GroupSequence, rank: int, other: int, until: int) -> str:
        lag = find_lag(self._sequences, sequence, rank, other, until)
        return "" if lag is None else self._describe_lag(lag)

    def _describe_lag(self, lag: Lag) -> str:
        count, call = len(lag.rows), call_view(self._job, lag.rows[0])
        if lag.made is not None:
            return f"rank {lag.rank} has made {lag.made} calls at {short_site(call.site)}, the others {count}"
        did = "made" if lag.extra else "left out"
        calls = f"{count} call{'s' if count > 1 else ''}{' more than the others' if lag.extra else ''}"
        began = "" if count == 1 else "from "
        at = f" at {short_site(call.site)}" if call.site else ""
        which = f"{began}number {call.seq_id}, {call.call}{at}{_in_step(call.step)}"
        return f"rank {lag.rank} {did} {calls}: {which}"

    def _lagging(self, ranks: Iterable[int], edges: Iterable[Edge]) -> str:
        """Which calls the first of ``ranks`` left out, where it is short of calls that others wait in."""
        for rank in ranks:
            for edge in edges:
                sequence = self._groups.get(self._job.signature(edge.row).group)
                if edge.for_rank == rank and sequence is not None and rank in sequence.members:
                    made = np.flatnonzero(sequence.row[sequence.members.index(rank)] != NO_ROW)
                    until = int(made[-1]) if len(made) else 0
                    words = self._lag_words(sequence, rank, edge.rank, until)
                    if words:
                        return words
        return ""

    def _waits(self, edges: Iterable[Edge], last: list[int]) -> tuple[Wait, ...]:
        """The waits, whoever is awaited together in one, the farthest from the end first."""
        job, distance = self._job, distances(edges, last)
        awaited: dict[int, list[Edge]] = defaultdict(list)
        for edge in edges:
            awaited[edge.row].append(edge)
        together: dict[tuple[int, tuple[int, ...], str, bool], list[int]] = defaultdict(list)
        for row, of_row in awaited.items():
            for_ranks = tuple(sorted({edge.for_rank for edge in of_row}))
            key = (int(job.joined.exchange[row]), for_ranks, of_row[0].reason, all(e.certain for e in of_row))
            together[key].append(row)
        found = []
        for (_, for_ranks, reason, certain), rows in together.items():
            ranks = tuple(sorted(int(job.joined.rank[row]) for row in rows))
            first = min(rows, key=lambda row: int(job.joined.start_ns[row]))
            wait = Wait(
                ranks=ranks,
                for_ranks=for_ranks,
                reason=reason,
                call=call_view(job, first),
                waited_ns=self._waited_ns(first),
                certain=certain,
            )
            found.append((-min(distance.get(rank, 0) for rank in ranks), ranks, wait))
        return tuple(wait for _, _, wait in sorted(found, key=lambda item: item[:2]))

    def _waited_ns(self, row: int) -> int | None:
        """How long a rank was seen in a call that did not end."""
        alive = [s.alive_ns for s in self._job.states.values() if s.alive_ns is not None]
        if not alive or self._job.states[int(self._job.joined.rank[row])].alive_ns is None:
            return None
        return max(0, max(alive) - int(self._job.joined.start_ns[row]))

    def _stalled(self) -> tuple[Wait, ...]:
        """Calls that everybody came to and that did not end all the same."""
        joined = self._job.joined
        whole = (joined.missing == 0) & (joined.expected > 1)
        waiting = {edge.rank for edge in self._blocked.edges}
        found: dict[int, list[int]] = defaultdict(list)
        for rank, rows in self._blocked.rows.items():
            for row in rows if rank not in waiting else ():
                if whole[joined.exchange[row]]:
                    found[int(joined.exchange[row])].append(row)
        return tuple(
            Wait(
                ranks=tuple(int(joined.rank[row]) for row in rows),
                for_ranks=(),
                reason="everybody came and it did not end",
                call=call_view(self._job, rows[0]),
                waited_ns=self._waited_ns(rows[0]),
                certain=True,
            )
            for rows in found.values()
        )

    def _deviation(self, odd: Odd) -> Deviation:
        rank = self._job.joined.rank
        return Deviation(
            what=odd.what,
            call=call_view(self._job, odd.parties[0][0]),
            parties=tuple(tuple(int(rank[row]) for row in party) for party in odd.parties),
            odd=odd.odd,
            calls=odd.calls,
            deviating=odd.deviating,
        )


def _in_step(step: int) -> str:
    return "" if step < 0 else f", step {step}"
