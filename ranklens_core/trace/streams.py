"""Rows on disk: one Arrow IPC stream per kind of row, checked before Arrow sees it.

The columns are the fields of the row's struct, so schema and code cannot drift apart. A flush
appends one record batch; its byte range and checksum go into the journal.
"""

from __future__ import annotations

import typing
from collections.abc import Sequence
from enum import StrEnum

import msgspec
import pyarrow as pa
import xxhash

from ranklens_core.schema import ADDRESS_BYTES, CallRow, CompletionRow, Signature, WaitRow
from ranklens_core.trace.files import AppendFile, write_all
from ranklens_core.trace.payload import ValueRow
from ranklens_core.trace.problem import damaged


class Stream(StrEnum):
    """The streams of a rank, in the order a flush writes them: what is referred to comes first."""

    VALUES = "values"
    SIGNATURES = "signatures"
    CALLS = "calls"
    COMPLETIONS = "completions"
    WAITS = "waits"

    @property
    def file(self) -> str:
        return f"{self}.arrows"


ROW_TYPES: dict[Stream, type[msgspec.Struct]] = {
    Stream.VALUES: ValueRow,
    Stream.SIGNATURES: Signature,
    Stream.CALLS: CallRow,
    Stream.COMPLETIONS: CompletionRow,
    Stream.WAITS: WaitRow,
}


class ByteRange(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes ``begin`` to ``end`` (exclusive) of a stream's file and their xxh3-128, in hex."""

    begin: int
    end: int
    xxh3_128: str


_END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"
"""Arrow columnar format, "IPC Streaming Format": a continuation mark and a length of 0."""


def arrow_type(field_type: typing.Any) -> pa.DataType:
    """The Arrow type of a struct's field."""
    if field_type is bool:
        return pa.bool_()
    if field_type is int:
        return pa.int64()
    if field_type is bytes:
        return pa.binary(ADDRESS_BYTES)
    if isinstance(field_type, type) and issubclass(field_type, str):
        return pa.utf8()
    if typing.get_origin(field_type) is tuple:
        return pa.list_(pa.field("item", arrow_type(typing.get_args(field_type)[0]), nullable=False))
    raise TypeError(f"no Arrow type for {field_type}")


def schema_of(row_type: type[msgspec.Struct]) -> pa.Schema:
    """Columns of a stream of ``row_type``: its fields, none of them nullable."""
    hints = typing.get_type_hints(row_type)
    return pa.schema(
        [pa.field(name, arrow_type(hints[name]), nullable=False) for name in row_type.__struct_fields__]
    )


class StreamWriter:
    """Appends batches of rows of one type to one file."""

    def __init__(self, file: AppendFile, row_type: type[msgspec.Struct]) -> None:
        self._file = file
        self._schema = schema_of(row_type)
        self._offset = 0

    def append(self, rows: Sequence[msgspec.Struct]) -> ByteRange:
        """Write ``rows`` (at least one) as a record batch.

        Raises:
            OSError: the file system refused.
            pa.ArrowInvalid, OverflowError, TypeError: a field has a value its type does not allow.
        """
        columns = zip(*map(msgspec.structs.astuple, rows), strict=True)
        arrays = [pa.array(column, field.type) for column, field in zip(columns, self._schema, strict=True)]
        batch = pa.RecordBatch.from_arrays(arrays, schema=self._schema)
        return self._write(batch.serialize())

    def finish(self) -> ByteRange:
        """Write the end-of-stream mark and close the file."""
        end = self._write(_END_OF_STREAM)
        self.close()
        return end

    def close(self) -> None:
        self._file.close()

    def _write(self, message: typing.Any) -> ByteRange:
        data = memoryview(message)
        if self._offset == 0:
            data = memoryview(bytes(self._schema.serialize()) + bytes(data))
        write_all(self._file, data)
        begin, self._offset = self._offset, self._offset + data.nbytes
        return ByteRange(begin=begin, end=self._offset, xxh3_128=xxhash.xxh3_128_hexdigest(data))


def range_problems(data: memoryview, ranges: Sequence[ByteRange]) -> list[str]:
    """What is wrong with a stream's bytes, range by range; empty if all is as written."""
    problems = []
    end = 0
    for part in ranges:
        if part.begin != end or part.end < part.begin:
            problems.append(f"the journal goes from byte {end} to byte {part.begin}")
        elif part.end > len(data):
            problems.append(f"{part.end} bytes were written, the file has {len(data)}")
            break
        elif xxhash.xxh3_128_hexdigest(data[part.begin : part.end]) != part.xxh3_128:
            problems.append(f"bytes {part.begin} to {part.end} differ from their checksum")
        end = part.end
    return problems


def read_stream(data: memoryview, ranges: Sequence[ByteRange], stream: Stream, path: str) -> pa.Table:
    """The rows of a stream: the bytes of ``ranges``; what lies beyond them was never flushed.

    The table shares the memory of ``data``. Columns that this RankLens does not know are left out.

    Raises:
        TraceDamagedError: the bytes differ from their checksums, or are no such stream.
    """
    expected = schema_of(ROW_TYPES[stream])
    problems = range_problems(data, ranges)
    if problems:
        raise damaged(path, problems[0])
    if not ranges:
        return expected.empty_table()
    try:
        with pa.ipc.open_stream(pa.py_buffer(data[: ranges[-1].end])) as reader:
            table = reader.read_all()
        table.validate(full=True)
        return _with_schema(table, expected)
    except (pa.ArrowException, OSError, ValueError, KeyError) as error:
        raise damaged(path, str(error)) from error


def _with_schema(table: pa.Table, expected: pa.Schema) -> pa.Table:
    """``table`` with the columns of ``expected``; ValueError if they are others, KeyError if missing."""
    table = table.select(expected.names)
    for field, column in zip(expected, table.columns, strict=True):
        if column.type != field.type:
            raise ValueError(f"column {field.name} is {column.type}, not {field.type}")
        while pa.types.is_list(column.type) and column.null_count == 0:
            column = pa.chunked_array([chunk.flatten() for chunk in column.chunks], column.type.value_type)
        if column.null_count:
            raise ValueError(f"column {field.name} has {column.null_count} nulls")
    return table
