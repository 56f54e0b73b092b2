"""Who waits for whom in an exchange, told from the recording itself.

An all-reduce ends on no rank before every rank has come; the sender of a small message goes on
before the receiver has posted; a broadcast's root may, or not, and an uneven all-to-all waits for
those it gets something from. What holds depends on op, backend and message size, so it is read off
the recorded times: who ended before another came did not wait for it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from ranklens_core.timing.join import ROOTED_OPS, Joined
from ranklens_core.timing.ranklog import NO_TIME, Bool, Int64

T = TypeVar("T", bound=np.generic)


@dataclass(frozen=True)
class Binding:
    """For each row of a ``Joined`` (rows that are no members: nothing).

    A row waits for its *others* (all members but itself and the root; of a message, the other side)
    if not most of the calls of its rank with its signature that could tell went ahead without;
    likewise for the *root*. Where it did not wait for all others in the recording,
    ``waits_for_some`` has the rows of those that had come by its end. ``ready_ns`` is the latest
    start among itself and those that it waited for in the recording (never one after its own end).
    ``previous`` is the row of the rank's previous collective on the group where these run one
    after the other, -1 where they need not: a group whose collectives overtook each other.
    """

    waits_for_others: Bool
    waits_for_root: Bool
    ready_ns: Int64
    previous: Int64
    root: Int64
    """Over exchanges: the root's row, -1 without one (or where it was not recorded)."""
    together: Bool
    """Over exchanges: every recorded member waited for every other one, and completed."""
    waits_for_some: Mapping[int, tuple[int, ...]]


def bind(joined: Joined) -> Binding:
    """Read off ``joined`` (clocks aligned) who waits for whom."""
    rows, exchange = joined.members, joined.exchange[joined.members]
    start, end = joined.start_ns[rows], joined.end_ns[rows]
    is_root, root = _roots(joined)
    root_start = np.where(root[exchange] >= 0, joined.start_ns[root[exchange]], NO_TIME)
    root_start = np.where(is_root, NO_TIME, root_start)
    other_start = _latest_other(np.where(is_root, NO_TIME, start), joined.offsets)

    kind = joined.kinds()[rows]
    waits_for_others = _waits(kind, start, end, other_start)
    waits_for_root = _waits(kind, start, end, root_start)
    ended = end != NO_TIME
    waits_for_root &= (root_start <= end) | ~ended
    ready = np.maximum(start, np.where(waits_for_root, root_start, NO_TIME))
    went_ahead = np.flatnonzero(waits_for_others & (other_start > end) & ended)
    waits_for_others[went_ahead] = False
    ready = np.maximum(ready, np.where(waits_for_others, other_start, NO_TIME))
    waits_for_some = {}
    for place in went_ahead.tolist():
        begin, stop = joined.offsets[exchange[place]], joined.offsets[exchange[place] + 1]
        came = (start[begin:stop] <= end[place]) & ~is_root[begin:stop]
        came[place - begin] = False
        ready[place] = max(ready[place], start[begin:stop][came].max(initial=NO_TIME))
        waits_for_some[int(rows[place])] = tuple(rows[begin:stop][came].tolist())

    waited = ready == np.maximum(start, np.maximum(root_start, other_start))
    whole = (waits_for_others | (other_start == NO_TIME)) & (waits_for_root | (root_start == NO_TIME))
    return Binding(
        waits_for_others=_over_rows(joined, waits_for_others, False),
        waits_for_root=_over_rows(joined, waits_for_root, False),
        ready_ns=_over_rows(joined, ready, NO_TIME),
        previous=_previous(joined),
        root=root,
        together=_all_of(waited & whole & ended, joined.offsets),
        waits_for_some=waits_for_some,
    )


def bound_at(joined: Joined, binding: Binding) -> Binding:
    """The ``binding`` of the same calls at other times, those of ``joined``: who waits for whom stays, when
    they had come is new."""
    rows, exchange = joined.members, joined.exchange[joined.members]
    root = binding.root[exchange]
    start = joined.start_ns[rows]
    root_start = np.where((root >= 0) & (root != rows), joined.start_ns[root], NO_TIME)
    other_start = _latest_other(np.where(root == rows, NO_TIME, start), joined.offsets)
    ready = np.maximum(start, np.where(binding.waits_for_root[rows], root_start, NO_TIME))
    ready = np.maximum(ready, np.where(binding.waits_for_others[rows], other_start, NO_TIME))
    ready_ns = _over_rows(joined, ready, NO_TIME)
    for row, others in binding.waits_for_some.items():
        ready_ns[row] = max(ready_ns[row], *(joined.start_ns[other] for other in others), NO_TIME)
    ended = joined.end_ns[rows] != NO_TIME
    together = binding.together & _all_of(ended, joined.offsets)
    return dataclasses.replace(binding, ready_ns=ready_ns, together=together)


def recorded_transfers(joined: Joined, binding: Binding) -> Int64:
    """Over rows, in ns, never negative: from the last arrival that its unit waited for (or the end of
    the previous call, where that came later) to its end; 0 for what did not end."""
    ready = binding.ready_ns.copy()
    after = np.flatnonzero(binding.previous >= 0)
    ready[after] = np.maximum(ready[after], joined.end_ns[binding.previous[after]])
    of_unit = np.full(len(ready), NO_TIME, np.int64)
    np.maximum.at(of_unit, joined.unit, ready)
    ended = joined.end_ns != NO_TIME
    return np.where(ended, joined.end_ns - np.where(ended, of_unit[joined.unit], 0), 0)


def _roots(joined: Joined) -> tuple[Bool, Int64]:
    """Which members are roots, and each exchange's root row or -1."""
    parts = []
    for log in joined.logs:
        roots = [
            s.op.removesuffix("_coalesced") in ROOTED_OPS
            and log.groups.get(s.group, ())[s.peer : s.peer + 1] == (log.rank,)
            for s in log.signatures
        ]
        parts.append(np.array(roots, bool)[log.signature])
    is_root: Bool = np.concatenate([np.zeros(0, bool), *parts])[joined.members]
    root = np.full(joined.n_exchanges, -1, np.int64)
    root[joined.exchange[joined.members[is_root]]] = joined.members[is_root]
    return is_root, root


def _latest_other(start: Int64, offsets: Int64) -> Int64:
    """For each member the latest start of the other members of its exchange; NO_TIME for none."""
    if not len(start):
        return start
    sizes = np.diff(offsets)
    latest = np.repeat(np.maximum.reduceat(start, offsets[:-1]), sizes)
    place = np.arange(len(start))
    at = np.where(start == latest, place, len(start))
    holds = place == np.repeat(np.minimum.reduceat(at, offsets[:-1]), sizes)
    second = np.repeat(np.maximum.reduceat(np.where(holds, NO_TIME, start), offsets[:-1]), sizes)
    return np.where(holds, second, latest)


def _waits(kind: Int64, start: Int64, end: Int64, other_start: Int64) -> Bool:
    """Whether calls of this kind wait: not if most that could tell ended before the other came."""
    can_tell = (end != NO_TIME) & (other_start > start)
    n_kinds = int(kind.max(initial=-1)) + 1
    told = np.bincount(kind[can_tell], minlength=n_kinds)
    ahead = np.bincount(kind[can_tell & (other_start > end)], minlength=n_kinds)
    waits: Bool = (2 * ahead <= told)[kind] & (other_start != NO_TIME)
    return waits


def _previous(joined: Joined) -> Int64:
    """See ``Binding.previous``."""
    groups: dict[str, int] = {}
    parts = [
        np.array([groups.setdefault(s.group, len(groups)) for s in log.signatures], np.int64)[log.signature]
        for log in joined.logs
    ]
    group = np.concatenate([np.zeros(0, np.int64), *parts])
    rows = np.flatnonzero(joined.is_member & ~joined.is_message[joined.exchange])
    rows = rows[np.lexsort((group[rows], joined.rank[rows]))]
    same = np.zeros(len(rows), bool)
    same[1:] = (group[rows][1:] == group[rows][:-1]) & (joined.rank[rows][1:] == joined.rank[rows][:-1])
    end = joined.end_ns[rows]
    overtook = np.zeros(len(rows), bool)
    overtook[1:] = same[1:] & (end[1:] < end[:-1]) & (end[1:] != NO_TIME)
    lane = np.cumsum(~same) - 1
    in_order = np.bincount(lane, weights=overtook, minlength=int(lane.max(initial=-1)) + 1) == 0
    previous = np.full(len(joined.rank), -1, np.int64)
    follows = np.flatnonzero(same & in_order[lane])
    previous[rows[follows]] = rows[follows - 1]
    return previous


def _all_of(of_members: Bool, offsets: Int64) -> Bool:
    """For each exchange whether it holds for all its members."""
    if not len(of_members):
        return of_members
    result: Bool = np.logical_and.reduceat(of_members, offsets[:-1])
    return result


def _over_rows(joined: Joined, of_members: npt.NDArray[T], otherwise: int) -> npt.NDArray[T]:
    """Values of members put in their rows."""
    result = np.full(len(joined.rank), otherwise, of_members.dtype)
    result[joined.members] = of_members
    return result
