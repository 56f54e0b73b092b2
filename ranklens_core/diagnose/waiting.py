"""Who waits for whom at the end of a job, and at whom it ends: a rank, or a circle of ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from ranklens_core.diagnose.disagreement import Split
from ranklens_core.diagnose.job import How, Job, RankState
from ranklens_core.diagnose.sequences import GroupSequence, Sequences
from ranklens_core.schema import NO_PEER, Signature
from ranklens_core.timing.join import MESSAGE_OPS
from ranklens_core.timing.ranklog import NO_TIME, Bool

MARGIN_NS = 1_000_000_000
"""A recording that ends less than this after somebody came to a call does not show that its rank did not
come too: what was recorded since the last flush is lost with a killed rank."""

ABSENT = "did not come to it"


@dataclass(frozen=True)
class Edge:
    """The rank of ``row`` waits in that call for ``for_rank``, which ``reason``; ``certain`` as in
    ``Wait``. What is not certain is ``likely`` where the awaited rank's recording ends long before others'.
    """

    row: int
    rank: int
    for_rank: int
    reason: str
    certain: bool
    likely: bool


class Blocked:
    """The calls in which ranks are stuck, and for whom."""

    def __init__(
        self, job: Job, sequences: Sequences, groups: Mapping[str, GroupSequence], splits: Iterable[Split]
    ) -> None:
        self._job = job
        self._sequences = sequences
        self._groups = groups
        self._splits = {s.sequence.key: s for s in splits if s.sequence is not None}
        self._message_splits = {
            row: s for s in splits if s.sequence is None for party in s.parties for row in party
        }
        alive = [state.alive_ns for state in job.states.values() if state.alive_ns is not None]
        self._alive_ns = max(alive, default=0)
        self._failed = np.array(sorted(job.failed), np.int64)
        self.rows = {log.rank: self._stuck_in(job.states[log.rank]) for log in job.logs}
        """By rank the rows it is stuck in; empty where it is not."""
        self.edges = [edge for rows in self.rows.values() for row in rows for edge in self._edges(row)]

    def _stuck_in(self, state: RankState) -> list[int]:
        job, log = self._job, self._job.joined.logs[self._place(state.rank)]
        rows = job.joined.rows_of(state.rank)
        first = rows.start
        begin, end = np.searchsorted(self._failed, (first, rows.stop))
        failed: list[int] = self._failed[begin:end].tolist()
        if state.how is How.FINISHED:
            return []
        if state.how is How.FAILED:
            return failed[-1:] if state.peer_lost else []
        if state.signal:
            return []
        open_calls = [int(at) for at in np.flatnonzero(log.end_ns == NO_TIME) if first + at not in job.failed]
        waiting = [at for at in state.waiting if at in open_calls]
        if waiting:
            return [first + at for at in waiting]
        if not open_calls:
            return failed[-1:]
        last = len(log.entry) - 1
        if open_calls[-1] == last and not log.signatures[int(log.signature[last])].is_async:
            return [first + last]
        # what comes first in its order holds up the rest
        earliest: dict[tuple[object, ...], int] = {}
        for at in open_calls:
            earliest.setdefault(_lane(log.signatures[int(log.signature[at])]), first + at)
        return list(earliest.values())

    def _place(self, rank: int) -> int:
        return next(place for place, log in enumerate(self._job.joined.logs) if log.rank == rank)

    def _edges(self, row: int) -> list[Edge]:
        signature = self._job.signature(row)
        if signature.op in MESSAGE_OPS:
            return self._message_edges(row, signature)
        sequence = self._groups.get(signature.group)
        if sequence is None:
            return []  # a group of one
        column = int(np.searchsorted(sequence.seq_ids, self._sequences.seq_id[row]))
        edges = [self._edge(row, rank, "was not recorded") for rank in sequence.unrecorded]
        lacking = sequence.lacking[:, column]
        for member in np.flatnonzero(lacking).tolist():
            edges.append(self._edge(row, sequence.members[member], ABSENT))
        split = self._splits.get(sequence.key)
        rank = int(self._job.joined.rank[row])
        if split is not None and split.column == column and rank not in split.odd:
            others = split.odd or tuple(
                int(self._job.joined.rank[other]) for party in split.parties for other in party
            )
            edges += [self._edge(row, other, "made another call") for other in others if other != rank]
        return edges

    def _message_edges(self, row: int, signature: Signature) -> list[Edge]:
        joined = self._job.joined
        exchange, rank = int(joined.exchange[row]), int(joined.rank[row])
        ranks = joined.log_of(row).groups.get(signature.group, ())
        counterpart = "receive" if signature.op == "send" else "send"
        if signature.peer == NO_PEER:
            return [self._edge(row, other, "did not send") for other in ranks if other != rank]
        peer = ranks[signature.peer]
        if not self._job.states[peer].has_log:
            return [self._edge(row, peer, "was not recorded")]
        if joined.offsets[exchange + 1] - joined.offsets[exchange] < 2:
            return [self._edge(row, peer, f"did not {counterpart}")]
        if row in self._message_splits:
            return [self._edge(row, peer, "means another message")]
        return []

    def _edge(self, row: int, for_rank: int, reason: str) -> Edge:
        state = self._job.states[for_rank]
        start_ns = int(self._job.joined.start_ns[row])
        certain = state.has_log and (
            state.alive_ns is None or state.is_over or state.alive_ns - start_ns >= MARGIN_NS
        )
        likely = state.alive_ns is None or self._alive_ns - state.alive_ns >= MARGIN_NS
        if state.signal:  # what it did at the last moment is lost
            reason = "was killed"
        return Edge(row, int(self._job.joined.rank[row]), for_rank, reason, certain, likely)


def _lane(signature: Signature) -> tuple[object, ...]:
    if signature.op in MESSAGE_OPS:
        return signature.group, signature.op, signature.peer
    return (signature.group,)


@dataclass(frozen=True)
class End:
    """Where the waiting ends: the ranks that all of ``waiters`` wait for, directly or not. More than one:
    they wait for each other."""

    ranks: tuple[int, ...]
    waiters: tuple[int, ...]


def ends(edges: Iterable[Edge]) -> list[End]:
    """Where the chains of ``edges`` end, those that hold up most ranks first."""
    pairs = sorted({(edge.rank, edge.for_rank) for edge in edges})
    ranks = sorted({rank for pair in pairs for rank in pair})
    place = {rank: at for at, rank in enumerate(ranks)}
    waits = np.zeros((len(ranks), len(ranks)), bool)
    for rank, other in pairs:
        waits[place[rank], place[other]] = True
    reaches = _closure(waits)
    circles = reaches & reaches.T
    found = []
    for at in range(len(ranks)):
        circle = circles[at] if circles[at, at] else np.arange(len(ranks)) == at
        # an end waits for nobody outside itself; of a circle the lowest rank stands for all
        if (reaches[at] & ~circle).any() or np.flatnonzero(circle)[0] != at:
            continue
        waiters = reaches[:, at] | (circle if circle.sum() > 1 else False)
        found.append(End(_pick(ranks, circle), _pick(ranks, waiters)))
    return sorted(found, key=lambda end: (-len(end.waiters), end.ranks))


def _closure(waits: Bool) -> Bool:
    """Who waits for whom, directly or not."""
    reaches = waits
    while True:
        numbers = reaches.astype(np.float32)
        further: Bool = reaches | (numbers @ numbers > 0)
        if (further == reaches).all():
            return reaches
        reaches = further


def _pick(ranks: list[int], chosen: Bool) -> tuple[int, ...]:
    return tuple(rank for rank, is_chosen in zip(ranks, chosen.tolist(), strict=True) if is_chosen)


def circle_of(edges: Iterable[Edge], ranks: Iterable[int]) -> tuple[int, ...]:
    """``ranks`` that wait for each other, as one way round: each waits for the next, the last for the first;
    the shortest from the lowest rank."""
    after: dict[int, list[int]] = defaultdict(list)
    inside = set(ranks)
    for edge in edges:
        if edge.rank in inside and edge.for_rank in inside:
            after[edge.rank].append(edge.for_rank)
    start = min(inside)
    paths: list[tuple[int, ...]] = [(start,)]
    seen = {start}
    for path in paths:
        for other in sorted(after[path[-1]]):
            if other == start:
                return path
            if other not in seen:
                seen.add(other)
                paths.append((*path, other))
    return tuple(sorted(inside))


def distances(edges: Iterable[Edge], ranks: Iterable[int]) -> Mapping[int, int]:
    """How many waits lie between each rank and the nearest of ``ranks``."""
    before: dict[int, set[int]] = defaultdict(set)
    for edge in edges:
        before[edge.for_rank].add(edge.rank)
    found = dict.fromkeys(ranks, 0)
    queue = list(found)
    for rank in queue:
        for other in sorted(before[rank]):
            if other not in found:
                found[other] = found[rank] + 1
                queue.append(other)
    return found
