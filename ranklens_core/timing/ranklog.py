"""One rank's log as numpy columns: what joining, alignment, arrivals and the simulator work on."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ranklens_core.schema import Signature
from ranklens_core.trace import RankTrace, Trace

Int64 = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]

NO_TIME = np.iinfo(np.int64).min
"""Stands where something did not happen: the end of a call that did not complete."""

_TIMES = ("enqueue_ns", "start_ns", "end_ns", "return_ns", "wait_begin_ns", "wait_end_ns")


@dataclass(frozen=True)
class RankLog:
    """A rank's calls and waits in entry order, every column an int64 array; times in ns.

    Columns of calls are as in ``CallRow`` and ``CompletionRow``. ``end_ns`` is ``NO_TIME`` where a
    call did not complete or failed, ``return_ns`` is ``NO_TIME`` where the call did not block (or
    did not complete). ``start_ns`` and ``end_ns`` of all calls of a coalescing batch are those of
    its last one. Columns of waits have the prefix ``wait_``; ``wait_call`` is the index (not the
    entry) of the call waited for. ``groups`` has the global ranks of each group by key.
    """

    rank: int
    signatures: tuple[Signature, ...]
    groups: Mapping[str, tuple[int, ...]]
    entry: Int64
    signature: Int64
    seq_id: Int64
    step: Int64
    batch: Int64
    enqueue_ns: Int64
    start_ns: Int64
    end_ns: Int64
    return_ns: Int64
    src_rank: Int64
    compute_ns: Int64
    compute_cpu_ns: Int64
    wait_entry: Int64
    wait_call: Int64
    wait_begin_ns: Int64
    wait_end_ns: Int64
    wait_compute_ns: Int64
    wait_compute_cpu_ns: Int64
    unit: Int64 = dataclasses.field(init=False)
    """For each call the index of the last call of its batch; outside a batch its own."""

    def __post_init__(self) -> None:
        unit = _batch_ends(self)
        object.__setattr__(self, "unit", unit)
        object.__setattr__(self, "start_ns", self.start_ns[unit])
        object.__setattr__(self, "end_ns", self.end_ns[unit])

    @classmethod
    def read(cls, trace: RankTrace) -> Self:
        """The log of a recorded rank; errors as ``RankTrace`` raises them."""
        calls, completions, waits = trace.calls, trace.completions, trace.waits
        entry = _column(calls, "entry")
        place = np.searchsorted(_column(completions, "entry"), entry)
        found = place < completions.num_rows
        place = np.where(found, place, 0)
        if completions.num_rows:
            failed = completions["error"].to_numpy() != ""
            found &= (_column(completions, "entry")[place] == entry) & ~failed[place].astype(bool)

        def completed(name: str, otherwise: int) -> Int64:
            if not completions.num_rows:
                return np.full(len(entry), otherwise, np.int64)
            return np.where(found, _column(completions, name)[place], otherwise)

        return_ns = completed("return_ns", NO_TIME)
        wait_entry, call_index = _column(waits, "entry"), _index_in(entry, _column(waits, "call"))
        known = call_index >= 0
        return cls(
            rank=trace.record.rank,
            signatures=trace.signatures,
            groups={group.key: group.ranks for group in trace.record.groups},
            entry=entry,
            **{name: _column(calls, name) for name in _CALL_COLUMNS},
            end_ns=completed("end_ns", NO_TIME),
            return_ns=np.where(return_ns == 0, NO_TIME, return_ns),
            src_rank=completed("src_rank", -1),
            wait_entry=wait_entry[known],
            wait_call=call_index[known],
            wait_begin_ns=_column(waits, "begin_ns")[known],
            wait_end_ns=_column(waits, "end_ns")[known],
            wait_compute_ns=_column(waits, "compute_ns")[known],
            wait_compute_cpu_ns=_column(waits, "compute_cpu_ns")[known],
        )

    @property
    def blocking(self) -> Bool:
        """Which calls held the program until they were over."""
        blocking: Bool = self.return_ns != NO_TIME
        return blocking

    def with_clock(self, convert: Callable[[Int64], Int64]) -> Self:
        """This log with every time put through ``convert``."""
        changes: dict[str, Any] = {}
        for name in _TIMES:
            times: Int64 = getattr(self, name)
            happened = times != NO_TIME
            changes[name] = times.copy()
            changes[name][happened] = convert(times[happened])
        return dataclasses.replace(self, **changes)

    def observed_at(self) -> Int64:
        """For each call the entry at which the program first waited for it: its own where it blocks,
        a wait's, or one past the log where the program never waited for it."""
        never = self.next_entry
        first = np.full(len(self.entry), never, np.int64)
        np.minimum.at(first, self.wait_call, self.wait_entry)
        first = np.where(self.blocking, self.entry, first)
        whole = np.full(len(self.entry), never, np.int64)
        np.minimum.at(whole, self.unit, first)  # one wait is for all of a batch
        return whole[self.unit]

    @property
    def next_entry(self) -> int:
        """One past the highest entry."""
        last = [int(entries[-1]) for entries in (self.entry, self.wait_entry) if len(entries)]
        return max(last, default=-1) + 1


_CALL_COLUMNS = (
    "signature",
    "seq_id",
    "step",
    "batch",
    "enqueue_ns",
    "start_ns",
    "compute_ns",
    "compute_cpu_ns",
)


def read_logs(trace: Trace) -> list[RankLog]:
    """The logs of all recorded ranks, each in its own host's clock."""
    return [RankLog.read(trace.rank(rank)) for rank in trace.ranks]


def _column(table: pa.Table, name: str) -> Int64:
    column: Int64 = table[name].to_numpy().astype(np.int64, copy=False)
    return column


def _index_in(entries: Int64, wanted: Int64) -> Int64:
    """Where each of ``wanted`` stands in the ascending ``entries``; -1 where it does not."""
    if not len(entries):
        return np.full(len(wanted), -1, np.int64)
    place = np.minimum(np.searchsorted(entries, wanted), len(entries) - 1)
    return np.where(entries[place] == wanted, place, -1)


def _batch_ends(log: RankLog) -> Int64:
    """The index of the last call of each call's batch; a batch is of one group."""
    unit = np.arange(len(log.entry), dtype=np.int64)
    batched = np.flatnonzero(log.batch >= 0)
    if len(batched):
        codes: dict[str, int] = {}
        group = np.array([codes.setdefault(s.group, len(codes)) for s in log.signatures], np.int64)
        key = log.batch[batched] * (len(codes) + 1) + group[log.signature[batched]]
        _, which = np.unique(key, return_inverse=True)
        last = np.zeros(int(which.max()) + 1, np.int64)
        np.maximum.at(last, which, batched)
        unit[batched] = last[which]
    return unit
