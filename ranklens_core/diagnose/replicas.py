"""Values that should be the same on several ranks and are not: the first call, and the odd rank.

Compared are content addresses, where the values of several ranks were recorded; no value is read.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from ranklens_core.diagnose.disagreement import majority
from ranklens_core.diagnose.job import Job, UInt64
from ranklens_core.diagnose.sequences import NO_ROW, GroupSequence
from ranklens_core.schema import Purpose
from ranklens_core.timing.ranklog import Bool, Int64

SAME_RESULT_OPS = frozenset(
    {
        "all_reduce",
        "all_reduce_coalesced",
        "broadcast",
        "all_gather",
        "all_gather_coalesced",
        "all_gather_into_tensor",
        "all_gather_into_tensor_coalesced",
    }
)
"""Ops that leave the same bytes on all members: each element is made once and copied, or only copied."""

HABIT = 3
"""So many calls with the same, changing input on all members make a replicated input."""


@dataclass(frozen=True)
class Odd:
    """The first call that deviates: ``rows`` by value, the largest party first; see ``Deviation``."""

    what: str
    parties: tuple[tuple[int, ...], ...]
    odd: tuple[int, ...]
    calls: int
    deviating: int


class Replicas:
    """Compares the values of a job; ``compared`` counts the calls that could be."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self.compared = 0
        joined = job.joined
        self._inputs = np.zeros(len(joined.rank), np.uint64)
        self._outputs = np.zeros(len(joined.rank), np.uint64)
        for rank, values in job.values.items():
            self._inputs[joined.rows_of(rank)] = values.inputs
            self._outputs[joined.rows_of(rank)] = values.outputs
        kinds, first = joined.kinds(), [s for log in joined.logs for s in log.signatures]
        self._same_result = _over(kinds, [s.op in SAME_RESULT_OPS for s in first])
        self._is_tensor = _over(kinds, [s.purpose is Purpose.TENSOR for s in first])
        self._is_send = _over(kinds, [s.op == "send" for s in first])
        self._is_broadcast = _over(kinds, [s.op == "broadcast" for s in first])

    def odd_ones(self, sequences: Iterable[GroupSequence], agreed: Int64) -> list[Odd]:
        """What deviates, first calls first; ``agreed`` as in ``Sequences``."""
        if not self._job.values:
            return []
        found = [odd for s in sequences for odd in (self._results(s), self._inputs_of(s, agreed)) if odd]
        message = self._messages()
        found += [message] if message else []
        return sorted(found, key=lambda odd: (odd.what == "input", self._start(odd)))

    def _start(self, odd: Odd) -> int:
        return min(int(self._job.joined.start_ns[row]) for party in odd.parties for row in party)

    def _results(self, sequence: GroupSequence) -> Odd | None:
        row, made = sequence.row, sequence.made
        same = made & self._same_result[row]
        value = np.where(same, self._outputs[row], np.uint64(0))
        # what a broadcast's root sent is what all must have
        sent = np.where(made & self._is_broadcast[row] & (value == 0), self._inputs[row], np.uint64(0))
        value = np.where(value == 0, sent, value)
        return self._first("result", row, value, self._differs(value))

    def _inputs_of(self, sequence: GroupSequence, agreed: Int64) -> Odd | None:
        """Replicated inputs: of calls of one kind, the same on all members, changing from call to call."""
        row, made = sequence.row, sequence.made & self._is_tensor[sequence.row]
        value = np.where(made & ~self._is_broadcast[row], self._inputs[row], np.uint64(0))
        if len(value) < 2 or not (value != 0).any():
            return None
        whole = (value != 0).all(axis=0)
        differs = self._differs(value, count=False) & whole
        kind = agreed[row[0]]
        for number in np.unique(kind[differs]).tolist():
            columns = np.flatnonzero((kind == number) & whole)
            first = int(np.argmax(differs[columns]))
            before = value[0, columns[:first]]
            if first >= HABIT and len(np.unique(before)) > 1:
                only = np.zeros(row.shape[1], bool)
                only[columns] = differs[columns]
                return self._first("input", row, value, only)
        return None

    def _messages(self) -> Odd | None:
        joined = self._job.joined
        begin = joined.offsets[:-1]
        pairs = np.flatnonzero(joined.is_message & (np.diff(joined.offsets) == 2))
        one, other = joined.members[begin[pairs]], joined.members[begin[pairs] + 1]
        sender, receiver = np.where(self._is_send[one], (one, other), (other, one))
        value = np.stack([self._inputs[sender], self._outputs[receiver]])
        return self._first("message", np.stack([sender, receiver]), value, self._differs(value))

    def _differs(self, value: UInt64, *, count: bool = True) -> Bool:
        """Columns in which two known values are not the same."""
        known = value != 0
        if count:
            self.compared += int((known.sum(axis=0) > 1).sum())
        highest = value.max(axis=0, initial=0)
        differs: Bool = (known & (value != highest)).any(axis=0)
        return differs

    def _first(self, what: str, row: Int64, value: UInt64, differs: Bool) -> Odd | None:
        columns = np.flatnonzero(differs)
        if not len(columns):
            return None
        column = int(columns[np.argmin(self._job.joined.start_ns[row[:, columns]].max(axis=0))])
        parties: dict[int, list[int]] = defaultdict(list)
        for at, number in zip(row[:, column].tolist(), value[:, column].tolist(), strict=True):
            if at != NO_ROW and number:
                parties[number].append(at)
        ordered = sorted(parties.values(), key=lambda party: (-len(party), party[0]))
        known = sum(map(len, ordered))
        leading = majority(ordered, known)
        rank = self._job.joined.rank
        odd = tuple(
            int(rank[at]) for party in ordered if leading is not None and party is not leading for at in party
        )
        calls = int(((value != 0).sum(axis=0) > 1).sum())
        return Odd(what, tuple(map(tuple, ordered)), odd, calls, len(columns))


def _over(kinds: Int64, of_kind: list[bool]) -> Bool:
    """Over rows what holds for their signature."""
    over: Bool = np.array(of_kind, bool)[kinds]
    return over
