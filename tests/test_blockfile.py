"""Values reach the disk in whole blocks, whatever the disk says to that."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from ranklens_core.trace.blockfile import BLOCK_BYTES, BUFFER_BYTES, BlockFile
from ranklens_core.trace.files import Data, open_new


def test_what_is_flushed_is_in_the_file_and_no_more(tmp_path: Path) -> None:
    path = tmp_path / "values"
    file = BlockFile(open_new(path))
    large = bytes(range(256)) * (BUFFER_BYTES // 256 + 3)
    file.write(b"ab")
    assert path.stat().st_size == 0
    assert file.flush() == BLOCK_BYTES - 2
    assert file.flush() == 0
    assert path.read_bytes() == b"ab" + bytes(BLOCK_BYTES - 2)
    file.write(large)
    padding = file.flush()
    assert (len(large) + padding) % BLOCK_BYTES == 0
    file.close()
    assert path.read_bytes() == b"ab" + bytes(BLOCK_BYTES - 2) + large


class Disk:
    """A file that takes ``at_once`` bytes a write and refuses the first ``refusals`` writes."""

    def __init__(self, at_once: int, refusals: int = 0, error: int = errno.EINVAL) -> None:
        self.at_once, self.refusals, self.error = at_once, refusals, error
        self.data = b""

    def write(self, data: Data, /) -> int:
        if self.refusals:
            self.refusals -= 1
            raise OSError(self.error, "refused")
        self.data += bytes(data[: self.at_once])
        return min(len(data), self.at_once)

    def truncate(self, size: int, /) -> int:
        self.data = self.data[:size]
        return size

    def seek(self, offset: int, /) -> int:
        return offset

    def close(self) -> None:
        """Nothing to let go of."""


def test_a_disk_that_takes_less_at_once_gets_all_of_it() -> None:
    disk = Disk(at_once=1000)
    file = BlockFile(disk)
    file.write(b"x" * 5000)
    file.flush()
    file.close()
    assert disk.data == b"x" * 5000


def test_a_disk_that_refuses_direct_writes_gets_ordinary_ones() -> None:
    disk = Disk(at_once=1 << 20, refusals=1)
    file = BlockFile(disk)
    file._is_direct = True
    file.write(b"x" * 5000)
    file.flush()
    file.close()
    assert disk.data == b"x" * 5000


def test_a_full_disk_is_an_error() -> None:
    file = BlockFile(Disk(at_once=0))
    file.write(b"x")
    with pytest.raises(OSError, match="accepts no more data"):
        file.flush()
    file = BlockFile(Disk(at_once=1, refusals=1, error=errno.ENOSPC))
    file.write(b"x")
    with pytest.raises(OSError, match="refused"):
        file.flush()
