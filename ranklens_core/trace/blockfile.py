"""Gigabytes to disk at little cost to the training: whole blocks, past the page cache where possible.

Nobody reads the values of a run while it lasts: in the page cache they would push out what the training
reads again, and putting them there takes longer than all other work on a value (measured on two busy
cores: 13 ms of 19 ms for 19 MB).
"""

from __future__ import annotations

import errno
import fcntl
import io
import mmap
import os
import time
from collections.abc import Sequence

from ranklens_core.trace.files import AppendFile, Data

BLOCK_BYTES = 4096
"""Direct writes begin, end and lie in memory at multiples of this; disks ask for 512 or 4096."""

BUFFER_BYTES = 2 << 20

SLOW_BYTES_PER_S = 200e6
"""A disk slower than this gets the page cache after all, which takes a burst at once."""

JUDGED_BYTES = 64 << 20
"""How much is written before the disk's speed is judged, and judged again: a single write may be unlucky."""


class BlockFile:
    """Appends to a new file through a buffer that goes out when it is full, or at ``flush``."""

    def __init__(self, file: AppendFile) -> None:
        self._file = file
        self._buffer = memoryview(
            mmap.mmap(-1, BUFFER_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # begins at a page
        )
        self._used = 0
        self._size_bytes = 0
        self._padding = 0
        self._is_direct = _set_direct(file, True)
        self._direct_bytes = 0
        self._direct_s = 0.0

    def write(self, data: Data) -> None:
        """Append ``data``. OSError if the file system refuses."""
        rest = memoryview(data).cast("B")
        while rest:
            count = min(len(rest), BUFFER_BYTES - self._used)
            self._buffer[self._used : self._used + count] = rest[:count]
            self._used += count
            rest = rest[count:]
            if self._used == BUFFER_BYTES:
                self._write_buffer()

    def write_blocks(self, blocks: Sequence[memoryview], nbytes: int) -> int:
        """Append the first ``nbytes`` of ``blocks``, without another copy; the file must have been flushed.

        Each block begins at a page in memory, and all but the last are whole blocks long. The last is
        filled up with zeros to a whole block, as ``flush`` does; returns how many. OSError as ``write``.
        """
        padding = -nbytes % BLOCK_BYTES
        left = nbytes + padding
        for block in blocks:
            piece = block[: min(len(block), left)]
            left -= len(piece)
            if not left and padding:
                piece[-padding:] = bytes(padding)
            self._write_out(piece)
        self._padding = padding
        return padding

    def flush(self) -> int:
        """Bring everything to the file, filled up with zeros to a whole block; how many of them."""
        if not self._used:
            return 0
        padding = -self._used % BLOCK_BYTES
        self._buffer[self._used : self._used + padding] = bytes(padding)
        self._used += padding
        self._write_buffer()
        self._padding = padding
        return padding

    def close(self) -> None:
        """Close the file, which ends with the last byte flushed; what was not flushed is not in it."""
        try:
            if self._padding:
                self._file.truncate(self._size_bytes - self._padding)
        finally:
            self._file.close()
        self._buffer = memoryview(b"")
        self._used = 0

    def _write_buffer(self) -> None:
        self._write_out(self._buffer[: self._used])
        self._used = 0

    def _write_out(self, data: memoryview) -> None:
        rest, began = data, time.monotonic()
        while rest:
            try:
                written = self._file.write(rest)
            except OSError as error:
                if not self._is_direct or error.errno != errno.EINVAL:
                    raise
                self._leave_direct()  # this disk wants larger blocks
                continue
            if not written:
                raise OSError("the file system accepts no more data")
            rest = rest[written:]
        if self._is_direct:
            self._judge_disk(len(data), time.monotonic() - began)
        self._size_bytes += len(data)
        self._padding = 0

    def _judge_disk(self, nbytes: int, took_s: float) -> None:
        self._direct_bytes += nbytes
        self._direct_s += took_s
        if self._direct_bytes >= JUDGED_BYTES:
            if self._direct_bytes < SLOW_BYTES_PER_S * self._direct_s:
                self._leave_direct()
            self._direct_bytes, self._direct_s = 0, 0.0

    def _leave_direct(self) -> None:
        self._is_direct = False
        _set_direct(self._file, False)


def _set_direct(file: AppendFile, wanted: bool) -> bool:
    """Whether writes pass by the page cache from now on; not every system and file system can."""
    flag = getattr(os, "O_DIRECT", 0)
    if not flag or not isinstance(file, io.FileIO):
        return False
    flags = fcntl.fcntl(file, fcntl.F_GETFL)
    try:
        fcntl.fcntl(file, fcntl.F_SETFL, flags | flag if wanted else flags & ~flag)
    except OSError:
        return False
    return wanted
