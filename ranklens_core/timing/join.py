"""Pairs each call with the same call on its peers.

What pairs is an *exchange*: one collective over its group, or one message from its sender to its
receiver. Ranks that were not recorded and calls that a rank never reached leave an exchange
incomplete, nothing more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ranklens_core.errors import TraceDamagedError
from ranklens_core.schema import NO_PEER, Signature
from ranklens_core.timing.ranklog import Bool, Int64, RankLog

MESSAGE_OPS = frozenset({"send", "recv", "recv_any_source"})
ROOTED_OPS = frozenset({"broadcast", "reduce", "gather", "scatter"})
"""Ops whose ``peer`` is a root, not the other end of a message."""


@dataclass(frozen=True)
class Joined:
    """All calls of all ranks, one *row* each, sorted by rank and entry, and who met whom.

    Arrays over rows are int64 unless said otherwise. ``row_of_rank[i]`` is the first row of
    ``logs[i]``. ``exchange`` is the number of a row's exchange. The calls of one collective
    coalescing batch are one exchange, whose member on each rank is the batch's last call; its
    messages stay separate exchanges that start and end together. ``unit`` is the row of the batch's
    last call, a row's own outside a batch: what completes as one.
    """

    logs: tuple[RankLog, ...]
    row_of_rank: Int64
    rank: Int64
    exchange: Int64
    unit: Int64
    is_member: Bool
    in_msg_bytes: Int64
    """Of the whole batch where a member stands for one."""
    out_msg_bytes: Int64
    members: Int64
    """Rows, by exchange and then rank; exchange ``e`` has ``members[offsets[e]:offsets[e + 1]]``."""
    offsets: Int64
    expected: Int64
    """How many members each exchange would have were nothing missing."""
    is_message: Bool
    """Over exchanges: point to point."""
    entry: Int64 = field(init=False)
    start_ns: Int64 = field(init=False)
    end_ns: Int64 = field(init=False)

    def __post_init__(self) -> None:
        for name in ("entry", "start_ns", "end_ns"):
            object.__setattr__(self, name, _stacked(self.logs, name))

    @property
    def n_exchanges(self) -> int:
        return len(self.expected)

    @property
    def missing(self) -> Int64:
        """Over exchanges: how many members were not recorded."""
        return self.expected - np.diff(self.offsets)

    def kinds(self) -> Int64:
        """For each row a number of its rank and signature."""
        first, kinds = 0, [np.zeros(0, np.int64)]
        for log in self.logs:
            kinds.append(log.signature + first)
            first += len(log.signatures)
        return np.concatenate(kinds)

    def log_of(self, row: int) -> RankLog:
        """The log that ``row`` is of."""
        return self.logs[self._place_of(row)]

    def signature(self, row: int) -> Signature:
        """The signature of the call in ``row``."""
        place = self._place_of(row)
        log = self.logs[place]
        return log.signatures[int(log.signature[row - int(self.row_of_rank[place])])]

    def _place_of(self, row: int) -> int:
        return int(np.searchsorted(self.row_of_rank, row, side="right")) - 1

    def rows_of(self, rank: int) -> slice:
        """The rows of ``rank``; KeyError if it was not recorded."""
        for place, log in enumerate(self.logs):
            if log.rank == rank:
                return slice(int(self.row_of_rank[place]), int(self.row_of_rank[place + 1]))
        raise KeyError(rank)


class UnitRows:
    """The member rows of each unit: of a batch several."""

    def __init__(self, joined: Joined) -> None:
        self._batches: dict[int, list[int]] = {}
        members = np.flatnonzero(joined.is_member & (joined.unit != np.arange(len(joined.unit))))
        for row, unit in zip(members.tolist(), joined.unit[members].tolist(), strict=True):
            self._batches.setdefault(unit, []).append(row)
        for unit, rows in self._batches.items():
            if joined.is_member[unit]:
                rows.append(unit)

    def __call__(self, unit: int) -> Sequence[int]:
        return self._batches.get(unit) or (unit,)


def join(logs: Sequence[RankLog]) -> Joined:
    """Join the logs of a run, in any order, each rank once.

    Collectives pair by (group, ``seq_id``), messages by (group, sender, receiver, order of issue), on
    the CPU also by tag: gloo tells tags apart, NCCL ignores them. A receive from any source pairs
    by where its message came from.

    Raises TraceDamagedError if a rank has two calls where one can be.
    """
    logs = sorted(logs, key=lambda log: log.rank)
    counts = np.array([len(log.entry) for log in logs], np.int64)
    row_of_rank = np.append(0, np.cumsum(counts)).astype(np.int64)
    rank = np.repeat(np.array([log.rank for log in logs], np.int64), counts)
    unit = _stacked(logs, "unit") + np.repeat(row_of_rank[:-1], counts)
    calls = _Calls(logs)
    member_row = _member_rows(calls, unit)
    order = _stacked(logs, "seq_id")
    messages, number = _message_order(calls)
    order[messages] = number

    is_member = member_row == np.arange(len(rank))
    rows = np.flatnonzero(is_member)
    keys = (order, calls.tag, calls.receiver, calls.sender, calls.group)
    # a rank may send to itself: its send comes before its receive
    rows = rows[np.lexsort([key[rows] for key in (calls.side, rank, *keys)])]
    is_new = _changes([key[rows] for key in keys])
    _check_once(calls, rank, rows, is_new, order)
    exchange = np.empty(len(rank), np.int64)
    exchange[rows] = np.cumsum(is_new) - 1
    first = rows[is_new]
    return Joined(
        logs=tuple(logs),
        row_of_rank=row_of_rank,
        rank=rank,
        exchange=exchange[member_row],
        unit=unit,
        is_member=is_member,
        in_msg_bytes=_summed(calls.in_msg_bytes, member_row),
        out_msg_bytes=_summed(calls.out_msg_bytes, member_row),
        members=rows,
        offsets=np.append(np.flatnonzero(is_new), len(rows)).astype(np.int64),
        expected=np.where(calls.is_message[first], 2, calls.group_size[first]),
        is_message=calls.is_message[first],
    )


class _Calls:
    """What pairs calls, over rows; groups are numbered, the same on all ranks."""

    def __init__(self, logs: Sequence[RankLog]) -> None:
        numbers: dict[str, int] = {}
        parts = [_columns(log, numbers) for log in logs]
        columns = np.concatenate([np.zeros((len(_COLUMNS), 0), np.int64), *parts], axis=1)
        self.group, self.side, self.sender, self.receiver, self.tag = columns[:5]
        self.group_size, self.in_msg_bytes, self.out_msg_bytes = columns[5:]
        self.group_keys = list(numbers)
        self.is_message: Bool = self.side != _COLLECTIVE


_COLUMNS = ("group", "side", "sender", "receiver", "tag", "group_size", "in_msg_bytes", "out_msg_bytes")
_COLLECTIVE, _SENDS, _RECEIVES = 0, 1, 2


def _columns(log: RankLog, numbers: dict[str, int]) -> Int64:
    """``_COLUMNS`` of one log, (columns, calls)."""
    of_signature = [_describe(log, signature, numbers) for signature in log.signatures]
    columns: Int64 = np.array(of_signature, np.int64).reshape(-1, len(_COLUMNS))[log.signature].T.copy()
    _, side, sender, _, _, _, _, _ = columns
    receives = side == _RECEIVES
    for call in np.flatnonzero(receives & (log.src_rank != NO_PEER)):
        ranks = log.groups.get(log.signatures[log.signature[call]].group, ())
        source = int(log.src_rank[call])
        sender[call] = ranks[source] if source < len(ranks) else _NOBODY
    # a receive from any source that never came pairs with nobody, not even with others like it
    nobody = np.flatnonzero(receives & (sender < 0))
    sender[nobody] = _NOBODY - log.entry[nobody]
    return columns


_NOBODY = -2


def _describe(log: RankLog, signature: Signature, numbers: dict[str, int]) -> tuple[int, ...]:
    ranks = log.groups.get(signature.group, (log.rank,))
    peer = ranks[signature.peer] if 0 <= signature.peer < len(ranks) else -1
    group = numbers.setdefault(signature.group, len(numbers))
    side, sender, receiver, tag = _COLLECTIVE, -1, -1, 0
    if signature.op == "send":
        side, sender, receiver = _SENDS, log.rank, peer
    elif signature.op in MESSAGE_OPS:
        side, sender, receiver = _RECEIVES, peer, log.rank
    if side != _COLLECTIVE and signature.device == "cpu":
        tag = signature.tag
    sizes = (len(ranks), signature.in_msg_bytes, signature.out_msg_bytes)
    return (group, side, sender, receiver, tag, *sizes)


def _member_rows(calls: _Calls, unit: Int64) -> Int64:
    """For each row the one that stands for it: the last collective of its batch, or itself."""
    stands = np.arange(len(unit), dtype=np.int64)
    collective = np.flatnonzero(~calls.is_message)
    last = np.full(len(unit), -1, np.int64)
    np.maximum.at(last, unit[collective], collective)
    stands[collective] = last[unit[collective]]
    return stands


def _message_order(calls: _Calls) -> tuple[Int64, Int64]:
    """The rows that are messages, and the how-manieth of its lane each is."""
    rows = np.flatnonzero(calls.is_message)
    lane = (calls.side, calls.group, calls.sender, calls.receiver, calls.tag)
    # rows ascend in entry order and a side of a lane is of one rank; the sort is stable
    rows = rows[np.lexsort([key[rows] for key in lane])]
    first = _changes([key[rows] for key in lane])
    place = np.arange(len(rows), dtype=np.int64)
    return rows, place - np.maximum.accumulate(np.where(first, place, 0))


def _changes(keys: Sequence[Int64]) -> Bool:
    """Where any of the sorted ``keys`` differs from the one before; true at the first."""
    changes = np.ones(len(keys[0]), bool)
    changes[1:] = False
    for key in keys:
        changes[1:] |= key[1:] != key[:-1]
    return changes


def _check_once(calls: _Calls, rank: Int64, rows: Int64, is_new: Bool, order: Int64) -> None:
    same = ~is_new[1:] & (rank[rows][1:] == rank[rows][:-1]) & (calls.side[rows][1:] == calls.side[rows][:-1])
    if same.any():
        row = rows[1:][same][0]
        raise TraceDamagedError(
            f"rank {rank[row]} has two calls number {order[row]} of group "
            f"{calls.group_keys[calls.group[row]]}. Its recording is damaged: record again."
        )


def _summed(nbytes: Int64, member_row: Int64) -> Int64:
    total = np.zeros(len(nbytes), np.int64)
    np.add.at(total, member_row, nbytes)
    return total


def _stacked(logs: Sequence[RankLog], name: str) -> Int64:
    return np.concatenate([np.zeros(0, np.int64), *(getattr(log, name) for log in logs)])
