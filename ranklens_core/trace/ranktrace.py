"""One rank of a trace: its calls as tables and records, its values by address."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from types import GenericAlias
from typing import TypeVar

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from ranklens_core.errors import TraceDamagedError, ValuesMissingError
from ranklens_core.schema import CallRecord, CallRow, CompletionRow, RankRecord, Signature
from ranklens_core.trace.files import TraceFiles
from ranklens_core.trace.journal import RankJournal
from ranklens_core.trace.layout import rank_directory
from ranklens_core.trace.payload import PayloadReader, ValueRow
from ranklens_core.trace.plausible import call_problem, completion_problem, signature_problem, wait_problem
from ranklens_core.trace.problem import damaged
from ranklens_core.trace.streams import Stream, read_stream

RowT = TypeVar("RowT", bound=msgspec.Struct)

_ROWS_AT_ONCE = 1 << 10
"""Rows turned into structs at a time: few, or the garbage collector walks their dicts again and again."""


class RankTrace:
    """One rank's recording. Files are mapped and checked when they are first needed.

    Any access can raise TraceDamagedError: bytes are missing or differ from their checksum.
    """

    def __init__(self, files: TraceFiles, journal: RankJournal) -> None:
        self.record: RankRecord = journal.record
        self.directory = rank_directory(journal.record.rank)
        self.path = f"{files.path}/{self.directory}"
        self.journal = journal
        self._files = files

    @cached_property
    def signatures(self) -> tuple[Signature, ...]:
        """Signatures by number."""
        signatures = tuple(self._rows(self._read(Stream.SIGNATURES), Stream.SIGNATURES, Signature))
        for number, signature in enumerate(signatures):
            problem = signature_problem(signature, self._group_sizes)
            if problem:
                raise self._damaged(Stream.SIGNATURES, f"signature {number} {problem}")
        return signatures

    @cached_property
    def calls(self) -> pa.Table:
        """Columns of ``CallRow``, in entry order."""
        table = self._in_entry_order(Stream.CALLS)
        return self._plausible(Stream.CALLS, table, call_problem(table, self.signatures))

    @cached_property
    def completions(self) -> pa.Table:
        """Columns of ``CompletionRow``, in entry order; calls that did not complete have none."""
        table = self._in_entry_order(Stream.COMPLETIONS)
        problem = completion_problem(table, self.calls, self.signatures, self._group_sizes)
        return self._plausible(Stream.COMPLETIONS, table, problem)

    @cached_property
    def waits(self) -> pa.Table:
        """Columns of ``WaitRow``, in entry order."""
        table = self._in_entry_order(Stream.WAITS)
        return self._plausible(Stream.WAITS, table, wait_problem(table, self.calls))

    @cached_property
    def values(self) -> PayloadReader:
        """The values, by address."""
        rows = self._rows(self._read(Stream.VALUES), Stream.VALUES, ValueRow)
        return PayloadReader(self.path, rows, self.data)

    @cached_property
    def joined_calls(self) -> pa.Table:
        """One row a call: columns of ``Signature``, ``CallRow`` and ``CompletionRow``, in entry order.

        Columns of ``CompletionRow`` are null where the call did not complete.
        """
        calls, completions = self.calls, self.completions
        table = self._read(Stream.SIGNATURES).take(calls["signature"])
        places = pc.index_in(calls["entry"], value_set=completions["entry"])
        ends = completions.take(places)
        names = [*calls.column_names, *table.column_names]
        columns = [*calls.columns, *table.columns]
        for name, column in zip(ends.column_names, ends.columns, strict=True):
            if name != "entry":
                names.append(name)
                columns.append(column)
        return pa.table(columns, names=names)

    def call_records(self) -> Iterator[CallRecord]:
        """All calls in entry order."""
        rank, signatures = self.record.rank, self.signatures
        ends = {row.entry: row for row in self._rows(self.completions, Stream.COMPLETIONS, CompletionRow)}
        for row in self._rows(self.calls, Stream.CALLS, CallRow):
            yield CallRecord(
                rank=rank, signature=signatures[row.signature], row=row, completion=ends.get(row.entry)
            )

    def payload(self, address: bytes) -> memoryview:
        """The value at ``address``: its bytes (uint8, read-only), mapped, not copied.

        Raises:
            ValuesMissingError: this rank's trace does not have it.
            TraceDamagedError: it is not the value that was recorded.
        """
        if not self.record.has_values:
            raise ValuesMissingError(
                f"{self.path}: the values of rank {self.record.rank} were not recorded. Record again with "
                f"ranklens record --payload {self.record.rank} (or all)."
            )
        return self.values.get(address)

    def release(self, address: bytes) -> None:
        """Let go of the memory of a value that ``payload`` gave; its bytes stay valid."""
        self.values.release(address)

    def warm(self, max_bytes: int) -> int:
        """Read and check values, up to ``max_bytes`` of them, in the order they were recorded.

        Later ``payload`` calls then find them in memory: a replay that keeps time must not wait for
        the disk. Returns the bytes read; raises as ``payload`` does.
        """
        read_bytes = 0
        for address in self.values.addresses():
            if read_bytes >= max_bytes:
                break
            read_bytes += self.payload(address).nbytes
        return read_bytes

    def data(self, name: str) -> memoryview | None:
        """All bytes of a file of this rank; None if it is not there."""
        return self._files.data(f"{self.directory}/{name}")

    def close(self) -> None:
        """Let go of the files; values still held stay valid. What is needed again is read again."""
        for name in ("signatures", "calls", "completions", "waits", "values", "joined_calls", "_tables"):
            self.__dict__.pop(name, None)

    @cached_property
    def _group_sizes(self) -> dict[str, int]:
        return {group.key: len(group.ranks) for group in self.record.groups}

    def _plausible(self, stream: Stream, table: pa.Table, problem: str) -> pa.Table:
        if problem:
            raise self._damaged(stream, problem)
        return table

    @cached_property
    def _tables(self) -> dict[Stream, pa.Table]:
        return {}

    def _read(self, stream: Stream) -> pa.Table:
        if stream not in self._tables:
            ranges = self.journal.ranges[stream]
            data = self.data(stream.file)
            if data is None:
                if ranges:
                    raise self._damaged(stream, "the file is missing")
                data = memoryview(b"")
            self._tables[stream] = read_stream(data, ranges, stream, f"{self.path}/{stream.file}")
        return self._tables[stream]

    def _in_entry_order(self, stream: Stream) -> pa.Table:
        """The rows sorted by entry: calls of several threads may have been queued out of order."""
        table = self._read(stream)
        entries = table["entry"].combine_chunks()
        if not _ascends(entries):
            table = table.sort_by("entry")
            if not _ascends(table["entry"].combine_chunks()):
                raise self._damaged(stream, "two rows have the same entry")
        return table

    def _rows(self, table: pa.Table, stream: Stream, row_type: type[RowT]) -> Iterator[RowT]:
        """The rows of a table of ``stream`` as structs."""
        many = GenericAlias(list, (row_type,))
        for begin in range(0, table.num_rows, _ROWS_AT_ONCE):
            rows = table.slice(begin, _ROWS_AT_ONCE).to_pylist()
            try:
                yield from msgspec.convert(rows, many)
            except msgspec.ValidationError as error:
                raise self._damaged(stream, f"after row {begin}: {error}") from error

    def _damaged(self, stream: Stream, text: str) -> TraceDamagedError:
        return damaged(f"{self.path}/{stream.file}", text)


def _ascends(entries: pa.Array) -> bool:
    """Whether entries are not negative and each is larger than the one before."""
    if len(entries) == 0:
        return True
    steps = pc.greater(entries[1:], entries[:-1])
    return bool(entries[0].as_py() >= 0 and pc.all(steps, min_count=0).as_py())
