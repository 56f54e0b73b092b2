"""The collectives of each group side by side: who made which call number, and what they said.

All comparisons are of numbered signatures in arrays, a column for each call: a million calls take
seconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from ranklens_core.diagnose.agreement import PAIRWISE_OPS, Terms, is_collective, terms, unfit_pair
from ranklens_core.diagnose.job import Job
from ranklens_core.timing.ranklog import Bool, Int64

NO_ROW = -1


@dataclass(frozen=True)
class GroupSequence:
    """The collectives of one group.

    ``members`` are its recorded ranks, ``seq_ids`` the call numbers that any of them made, ascending;
    ``row`` (members, calls) has each member's row, ``NO_ROW`` where it made no such call or it was not
    recorded. ``unrecorded`` are its other ranks.
    """

    key: str
    ranks: tuple[int, ...]
    members: tuple[int, ...]
    unrecorded: tuple[int, ...]
    seq_ids: Int64
    row: Int64

    @property
    def made(self) -> Bool:
        """Which member is known to have made which call."""
        made: Bool = self.row != NO_ROW
        return made

    @property
    def lacking(self) -> Bool:
        """Which member has no such call: its own calls end before it, or have it missing. Calls from before
        the first that is known (of a ring buffer) are not lacking."""
        made = self.made
        first = np.where(made.any(axis=1), made.argmax(axis=1), 0)
        lacking: Bool = ~made & (np.arange(made.shape[1]) >= first[:, None])
        return lacking


class Sequences:
    """All groups of a job, and their calls' terms by number."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._terms: list[Terms] = []
        self._codes: dict[tuple[tuple[str, str], ...], int] = {}
        self._sites: dict[tuple[int, str], int] = {}
        self._groups: dict[str, int] = {}
        parts = [self._describe(place) for place in range(len(job.logs))]
        columns = np.concatenate([np.zeros((4, 0), np.int64), *parts], axis=1)
        self.agreed, self.written, self._group, collective = columns
        """Over rows: numbers of what all members must agree on, and of that with the program's line."""
        self._is_collective = collective.astype(bool)
        self.seq_id = _stacked([log.seq_id for log in job.logs])
        self.step = _stacked([log.step for log in job.logs])

    def terms(self, row: int) -> Terms:
        """What the call in ``row`` says that the other members must say too."""
        return self._terms[int(self.agreed[row])]

    def groups(self) -> Iterator[GroupSequence]:
        """The groups of more than one rank that have collectives."""
        rows = np.flatnonzero(self._is_collective)
        rows = rows[np.argsort(self._group[rows], kind="stable")]
        group = self._group[rows]
        starts = np.flatnonzero(np.append(True, group[1:] != group[:-1])[: len(rows)]).tolist()
        for start, end in pairwise([*starts, len(rows)]):
            sequence = self._sequence(rows[start:end])
            if len(sequence.ranks) > 1:
                yield sequence

    def unfit_columns(self, sequence: GroupSequence) -> Iterator[tuple[int, tuple[int, int, int, int]]]:
        """Columns of pairwise ops whose sizes do not fit, ascending, and whom they do not fit
        (``unfit_pair``, but with global ranks)."""
        ops = np.array([item["op"] in PAIRWISE_OPS for item in self._terms], bool)
        row = sequence.row
        first = row[sequence.made.argmax(axis=0), np.arange(row.shape[1])]
        columns = np.flatnonzero(ops[self.agreed[first]] & (sequence.made.sum(axis=0) > 1))
        place = {rank: at for at, rank in enumerate(sequence.ranks)}
        seen: dict[bytes, tuple[int, int, int, int] | None] = {}
        signature = self._job.joined.kinds()
        for column in columns.tolist():
            numbers = np.where(row[:, column] == NO_ROW, NO_ROW, signature[row[:, column]])
            key = numbers.tobytes()
            if key not in seen:
                said: list[Any] = [None] * len(sequence.ranks)
                for member, at in zip(sequence.members, row[:, column].tolist(), strict=True):
                    if at != NO_ROW and self.agreed[at] == self.agreed[first[column]]:
                        said[place[member]] = self._job.signature(at)
                seen[key] = unfit_pair(said)
            unfit = seen[key]
            if unfit is not None:
                sender, receiver, sent, expected = unfit
                yield column, (sequence.ranks[sender], sequence.ranks[receiver], sent, expected)

    def _sequence(self, rows: Int64) -> GroupSequence:
        job = self._job
        key = job.signature(int(rows[0])).group
        known = next(log.groups[key] for log in job.logs if key in log.groups)
        members = tuple(rank for rank in known if job.states[rank].has_log)
        seq_ids, column = np.unique(self.seq_id[rows], return_inverse=True)
        place = np.full(job.world_size, -1, np.int64)
        place[list(members)] = np.arange(len(members))
        table = np.full((len(members), len(seq_ids)), NO_ROW, np.int64)
        member = place[job.joined.rank[rows]]
        inside = member >= 0
        table[member[inside], column[inside]] = rows[inside]
        unrecorded = tuple(rank for rank in known if rank not in members)
        return GroupSequence(key, known, members, unrecorded, seq_ids, table)

    def _describe(self, place: int) -> Int64:
        """agreed, written, group and whether it is a collective, over the calls of one log."""
        log = self._job.logs[place]
        described = []
        for signature in log.signatures:
            ranks = log.groups.get(signature.group, (log.rank,))
            said = terms(signature, ranks.index(log.rank) if log.rank in ranks else 0)
            code = self._codes.setdefault(tuple(said.items()), len(self._codes))
            if code == len(self._terms):
                self._terms.append(said)
            site = signature.program_site or signature.site
            written = self._sites.setdefault((code, site), len(self._sites))
            group = self._groups.setdefault(signature.group, len(self._groups))
            described.append((code, written, group, is_collective(signature)))
        table: Int64 = np.array(described, np.int64).reshape(-1, 4)
        return table[log.signature].T


def _stacked(parts: Sequence[Int64]) -> Int64:
    return np.concatenate([np.zeros(0, np.int64), *parts])
