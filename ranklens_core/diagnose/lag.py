"""Which calls a rank left out, or made in addition, told from the order of the calls around."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ranklens_core.diagnose.sequences import NO_ROW, GroupSequence, Sequences
from ranklens_core.timing.ranklog import Int64

MAX_LAG = 64
"""How many calls a rank is looked for behind or ahead."""

WINDOW = 64
"""How many calls must be the same one step further on for a rank to be that far behind."""


@dataclass(frozen=True)
class Lag:
    """``rank`` left out (or, with ``extra``, made in addition) the calls in ``rows``: of another rank that
    made them, or its own. Where the order does not tell, ``made`` is how many calls it made at the line at
    which the other rank made those in ``rows``, else None."""

    rank: int
    extra: bool
    rows: tuple[int, ...]
    made: int | None = None


def find_lag(sequences: Sequences, sequence: GroupSequence, rank: int, other: int, until: int) -> Lag | None:
    """How ``rank``'s calls up to column ``until`` and ``other``'s part; None if their order does not tell.

    Calls are the same if they agree and come from the same line of the program: a rank that left out a call
    goes on with the next ones, one place too early. Where nothing follows, what used to follow tells; where
    all calls are alike, the training step they are made in does.
    """
    own_row, other_row = (sequence.row[sequence.members.index(r)] for r in (rank, other))
    both = np.flatnonzero((own_row != NO_ROW) & (other_row != NO_ROW))
    if not len(both):
        return None
    own, theirs = _line(sequences, own_row), _line(sequences, other_row)
    parted = both[own[both] != theirs[both]]
    if len(parted):
        at = int(parted[0])
        return (
            _shifted(rank, own_row, other_row, own, theirs, at)
            or _habit(rank, own_row, other_row, own, theirs, at)
            or _count(rank, other_row, own, theirs, at)
        )
    return _by_step(sequences, rank, own_row, other_row, both, until)


def _line(sequences: Sequences, row: Int64) -> Int64:
    """A member's calls with their lines as numbers, up to its last."""
    made = np.flatnonzero(row != NO_ROW)
    end = int(made[-1]) + 1 if len(made) else 0
    return np.where(row[:end] != NO_ROW, sequences.written[row[:end]], NO_ROW)


def _shifted(rank: int, own_row: Int64, other_row: Int64, own: Int64, theirs: Int64, at: int) -> Lag | None:
    for lag in range(1, MAX_LAG):
        if _continues(own[at:], theirs[at + lag :]):
            return Lag(rank, False, tuple(other_row[at : at + lag].tolist()))
        if _continues(theirs[at:], own[at + lag :]):
            return Lag(rank, True, tuple(own_row[at : at + lag].tolist()))
    return None


def _continues(behind: Int64, ahead: Int64) -> bool:
    size = min(len(behind), len(ahead), WINDOW)
    return size > 0 and bool((behind[:size] == ahead[:size]).all())


def _habit(rank: int, own_row: Int64, other_row: Int64, own: Int64, theirs: Int64, at: int) -> Lag | None:
    """From what followed the last time that the two calls in question were made."""
    before = theirs[:at]
    gaps = []
    for extra, first, then in ((False, theirs[at], own[at]), (True, own[at], theirs[at])):
        for start in np.flatnonzero(before == first)[::-1][:1].tolist():
            follows = np.flatnonzero(before[start + 1 : start + 1 + MAX_LAG] == then)
            if len(follows):
                gaps.append((int(follows[0]) + 1, extra))
    if not gaps:
        return None
    lag, extra = min(gaps)
    # only the first of the calls in question is there: the others never came that far
    row = own_row[at] if extra else other_row[at]
    return Lag(rank, extra, (int(row),) * lag)


def _count(rank: int, other_row: Int64, own: Int64, theirs: Int64, at: int) -> Lag | None:
    """How many calls both made at the line where the other is, if it is no new one."""
    calls = np.flatnonzero(theirs[: at + 1] == theirs[at])
    made = int((own[:at] == theirs[at]).sum())
    return Lag(rank, False, tuple(other_row[calls].tolist()), made) if made else None


def _by_step(
    sequences: Sequences, rank: int, own_row: Int64, other_row: Int64, both: Int64, until: int
) -> Lag | None:
    own_step, other_step = sequences.step[own_row[both]], sequences.step[other_row[both]]
    parted = np.flatnonzero((own_step != other_step) & (both <= until))
    if not len(parted):
        return None
    at = int(parted[0])
    ahead = int(own_step[at]) > int(other_step[at])
    step = int(min(own_step[at], other_step[at]))
    own_calls, other_calls = (
        row[row != NO_ROW][sequences.step[row[row != NO_ROW]] == step] for row in (own_row, other_row)
    )
    missing = len(other_calls) - len(own_calls)
    if ahead and missing > 0:
        return Lag(rank, False, tuple(other_calls[-missing:].tolist()))
    if not ahead and missing < 0:
        return Lag(rank, True, tuple(own_calls[missing:].tolist()))
    return None
