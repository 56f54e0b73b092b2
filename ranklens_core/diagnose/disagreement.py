"""Where the collectives of a group first differ between its ranks, and who is the odd one."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from ranklens_core.diagnose.agreement import numels
from ranklens_core.diagnose.job import Job
from ranklens_core.diagnose.sequences import NO_ROW, GroupSequence, Sequences
from ranklens_core.text import ranks_words


@dataclass(frozen=True)
class Split:
    """The first call about which a group disagrees: rows by party, the largest first.

    ``column`` is its place in ``sequence`` (None: a message). ``fields`` as in ``Disagreement``, ``odd``
    the ranks outside a majority.
    """

    sequence: GroupSequence | None
    column: int | None
    parties: tuple[tuple[int, ...], ...]
    fields: tuple[tuple[str, str], ...]
    odd: tuple[int, ...]


def first_split(job: Job, sequences: Sequences, sequence: GroupSequence) -> Split | None:
    """The first call of a group that its members do not agree about; None if they agree."""
    code = np.where(sequence.made, sequences.agreed[sequence.row], NO_ROW)
    reference = code.max(axis=0)
    differs = np.flatnonzero((sequence.made & (code != reference)).any(axis=0))
    column = int(differs[0]) if len(differs) else None
    unfit = next(sequences.unfit_columns(sequence), None)
    if unfit is not None and (column is None or unfit[0] < column):
        return _unfit_split(sequence, *unfit)
    return None if column is None else _split(job, sequences, sequence, column)


def message_splits(job: Job) -> list[Split]:
    """Messages whose sender and receiver mean another number of elements or another dtype, the first of each
    pair of ranks."""
    joined = job.joined
    begin, size = joined.offsets[:-1], np.diff(joined.offsets)
    pairs = np.flatnonzero(joined.is_message & (size == 2))
    first, second = joined.members[begin[pairs]], joined.members[begin[pairs] + 1]
    kind = joined.kinds()
    _, index = np.unique(np.stack([kind[first], kind[second]]), axis=1, return_index=True)
    found = []
    for at in sorted(index.tolist()):
        one, other = job.signature(int(first[at])), job.signature(int(second[at]))
        sent, received = (one, other) if one.op == "send" else (other, one)
        fields = []
        if numels(sent.in_shapes) != numels(received.out_shapes):
            fields.append(
                ("elements", f"{_sum(sent.in_shapes)} sent, {_sum(received.out_shapes)} to be received")
            )
        if sent.in_dtypes != received.out_dtypes:
            fields.append(
                (
                    "dtype",
                    f"{', '.join(sent.in_dtypes)} sent, {', '.join(received.out_dtypes)} to be received",
                )
            )
        if fields:
            rows = ((int(first[at]),), (int(second[at]),))
            found.append(Split(None, None, rows, tuple(fields), ()))
    return found


def majority(parties: list[list[int]], of_how_many: int) -> list[int] | None:
    """The party that is more than half of all, None if there is none."""
    largest = max(parties, key=len)
    return largest if 2 * len(largest) > of_how_many and len(largest) < of_how_many else None


def _split(job: Job, sequences: Sequences, sequence: GroupSequence, column: int) -> Split:
    rows = [row for row in sequence.row[:, column].tolist() if row != NO_ROW]
    by_code: dict[int, list[int]] = defaultdict(list)
    for row in rows:
        by_code[int(sequences.agreed[row])].append(row)
    parties = sorted(by_code.values(), key=lambda party: (-len(party), party[0]))
    leading = majority(parties, len(rows))
    odd = [row for row in rows if leading is not None and row not in leading]
    said = [sequences.terms(party[0]) for party in parties]
    names = list(dict.fromkeys(name for terms in said for name in terms))
    fields = [
        (name, _for_whom(job, parties, [terms.get(name, "none") for terms in said]))
        for name in names
        if len({terms.get(name) for terms in said}) > 1
    ]
    if any(name == "op" for name, _ in fields):
        fields = [item for item in fields if item[0] == "op"]  # another op differs in everything
    ranks = tuple(int(job.joined.rank[row]) for row in odd)
    return Split(sequence, column, tuple(map(tuple, parties)), tuple(fields), ranks)


def _unfit_split(sequence: GroupSequence, column: int, unfit: tuple[int, int, int, int]) -> Split:
    sender, receiver, sent, expected = unfit
    at = [sequence.row[sequence.members.index(rank), column] for rank in (sender, receiver)]
    fields = ((f"elements from rank {sender} to rank {receiver}", f"{sent} sent, {expected} expected"),)
    parties = tuple((int(row),) for row in dict.fromkeys(at))
    return Split(sequence, column, parties, fields, ())


def _for_whom(job: Job, parties: list[list[int]], values: list[str]) -> str:
    ranks: dict[str, list[int]] = defaultdict(list)
    for party, value in zip(parties, values, strict=True):
        ranks[value].extend(int(job.joined.rank[row]) for row in party)
    return "; ".join(f"{value} on {ranks_words(of)}" for value, of in ranks.items())


def _sum(shapes: tuple[tuple[int, ...], ...]) -> int:
    return sum(numels(shapes))
