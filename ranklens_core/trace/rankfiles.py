"""The files of one rank while they are being written, by one thread."""

from __future__ import annotations

from pathlib import Path

import msgspec

from ranklens_core.schema import CallRow, CompletionRow, Signature, WaitRow
from ranklens_core.trace.files import Opener
from ranklens_core.trace.journal import JournalWriter
from ranklens_core.trace.layout import JOURNAL_FILE
from ranklens_core.trace.lines import FlushLine, HeaderLine, Line
from ranklens_core.trace.payload import PayloadWriter
from ranklens_core.trace.staging import Staged
from ranklens_core.trace.streams import ROW_TYPES, ByteRange, Stream, StreamWriter

Row = Signature | CallRow | CompletionRow | WaitRow

_STREAM_OF: dict[type, Stream] = {row_type: stream for stream, row_type in ROW_TYPES.items()}


class RankFiles:
    """Journal, streams and payload files of a rank. Every method raises OSError if the disk refuses."""

    def __init__(self, directory: Path, header: HeaderLine, opener: Opener) -> None:
        """Create the files and begin the journal; OSError if one of them is there already."""
        directory.mkdir(parents=True, exist_ok=True)
        self._journal = JournalWriter(opener(directory / JOURNAL_FILE))
        self._payload = PayloadWriter(directory, opener)
        self._streams: dict[Stream, StreamWriter] = {}
        self._rows: dict[Stream, list[msgspec.Struct]] = {stream: [] for stream in Stream}
        try:
            self._journal.append(header)
            for stream in Stream:
                self._streams[stream] = StreamWriter(opener(directory / stream.file), ROW_TYPES[stream])
        except OSError:
            self.close()
            raise

    @property
    def row_count(self) -> int:
        """Rows that wait for the next flush."""
        return sum(map(len, self._rows.values()))

    def line(self, line: Line) -> None:
        """Write a line to the journal."""
        self._journal.append(line)

    def row(self, row: Row) -> None:
        """Keep a row for the next flush."""
        self._rows[_STREAM_OF[type(row)]].append(row)

    def value(self, address: bytes, data: Staged) -> None:
        """Write a value to the payload file; its row waits for the next flush."""
        self._rows[Stream.VALUES].append(self._payload.append(address, data))

    def flush(self, time_ns: int) -> bool:
        """Write values and the rows kept, then the line in the journal that makes them count; whether there
        were any."""
        self._payload.flush()
        ranges = {stream: self._streams[stream].append(rows) for stream, rows in self._rows.items() if rows}
        self._commit(ranges, time_ns)
        return bool(ranges)

    def finish(self, time_ns: int) -> None:
        """End every stream after its last flush."""
        self._commit({stream: writer.finish() for stream, writer in self._streams.items()}, time_ns)

    def close(self) -> None:
        """Close all files."""
        self._journal.close()
        self._payload.close()
        for writer in self._streams.values():
            writer.close()

    def _commit(self, ranges: dict[Stream, ByteRange], time_ns: int) -> None:
        if ranges:
            self._journal.append(FlushLine(time_ns=time_ns, ranges=ranges))
        for rows in self._rows.values():
            rows.clear()
