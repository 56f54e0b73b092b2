"""A rank's stdout or stderr as the launcher reads it: whole lines, bytes untouched."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field

OutputHandler = Callable[[int, str, bytes], None]
"""Called with (rank, "stdout" or "stderr", one or more whole lines)."""

_MAX_LINE_BYTES = 1 << 20  # a longer line is passed on in pieces


@dataclass
class RankStream:
    """The launcher's end of a rank's stdout or stderr."""

    rank: int
    name: str
    fd: int
    pending: bytearray = field(default_factory=bytearray)
    open: bool = True

    def read(self) -> bytes:
        """The whole lines that have come in, all of the rest at the end; closes itself then.

        Takes all that is in the pipe (64 KiB unless a rank enlarges it, at most 1 MiB).
        """
        if not self.open:
            return b""
        try:
            data = os.read(self.fd, 1 << 20)
        except BlockingIOError:
            return b""
        if not data:
            return self.close()
        self.pending += data
        # A carriage return ends a line too (progress bars), unless a newline may follow it.
        end = max(self.pending.rfind(b"\n"), self.pending.rfind(b"\r", 0, len(self.pending) - 1)) + 1
        if not end and len(self.pending) > _MAX_LINE_BYTES:
            end = len(self.pending)
        lines = bytes(self.pending[:end])
        del self.pending[:end]
        return lines

    def close(self) -> bytes:
        """A last line without its newline is given one, or the next rank's line would be glued to it."""
        if self.open:
            os.close(self.fd)
        self.open = False
        rest = bytes(self.pending)
        self.pending.clear()
        return rest + b"\n" if rest else b""


def write_output(rank: int, name: str, lines: bytes) -> None:
    """Pass a rank's bytes on as they are, UTF-8 or not."""
    stream = sys.stdout if name == "stdout" else sys.stderr
    stream.buffer.write(lines)
    stream.buffer.flush()
