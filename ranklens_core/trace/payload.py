"""Values: raw tensor bytes, appended to payload files and addressed by their content."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import msgspec
import xxhash

from ranklens_core.errors import ValuesMissingError
from ranklens_core.trace.blockfile import BlockFile
from ranklens_core.trace.files import Data, Opener
from ranklens_core.trace.layout import payload_file
from ranklens_core.trace.problem import damaged
from ranklens_core.trace.staging import Staged

ROLL_AT_BYTES = 1 << 30
"""A payload file that has reached this size is followed by the next."""

ALIGNMENT = 64
"""Values begin at multiples of this, so that a mapped value can be viewed as any dtype."""


FAULT_AROUND_BYTES = 1 << 16
"""Linux maps the neighbourhood, aligned to this, of a page of a file that is touched (fault_around_bytes)."""


class ValueRow(msgspec.Struct, frozen=True, kw_only=True):
    """Where a value lies: ``nbytes`` bytes from ``offset`` of payload file number ``file``."""

    address: bytes
    file: int
    offset: int
    nbytes: int


def content_address(data: Data) -> bytes:
    """The address of a value: xxh3-128 of its bytes, 16 bytes, big endian.

    ``data`` must be C-contiguous (any format); BufferError if it is not.
    """
    return xxhash.xxh3_128_digest(data)


class PayloadWriter:
    """Appends values to the payload files of one rank."""

    def __init__(self, directory: Path, opener: Opener, roll_at_bytes: int = ROLL_AT_BYTES) -> None:
        self._directory = directory
        self._opener = opener
        self._roll_at_bytes = roll_at_bytes
        self._file: BlockFile | None = None
        self._number = -1
        self._offset = 0

    def append(self, address: bytes, data: Staged) -> ValueRow:
        """Write a value; the row says where. It is on disk after ``flush``. OSError if the disk refuses."""
        if self._file is None or self._offset >= self._roll_at_bytes:
            self._roll()
        assert self._file is not None
        if data.blocks:
            self.flush()
            begin = self._offset
            self._offset += data.nbytes + self._file.write_blocks(data.blocks, data.nbytes)
        else:
            padding = -self._offset % ALIGNMENT
            self._file.write(bytes(padding))
            self._file.write(data.small)
            begin = self._offset + padding
            self._offset = begin + data.nbytes
        return ValueRow(address=address, file=self._number, offset=begin, nbytes=data.nbytes)

    def flush(self) -> None:
        """Bring all values to the disk. OSError if it refuses."""
        if self._file is not None:
            self._offset += self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _roll(self) -> None:
        self.flush()
        self.close()
        self._number += 1
        self._file = BlockFile(self._opener(self._directory / payload_file(self._number)))
        self._offset = 0


class PayloadReader:
    """Values of one rank by address. Every value is compared with its address when first read."""

    def __init__(self, path: str, rows: Iterable[ValueRow], read: Callable[[str], memoryview | None]) -> None:
        """``path`` is the rank's directory, for messages; ``read`` gives a file of it."""
        self._path = path
        self._read = read
        self._places: Mapping[bytes, ValueRow] = {row.address: row for row in rows}
        self._files: dict[int, memoryview] = {}
        self._file_bytes: dict[int, int] = {}
        for place in self._places.values():
            end = place.offset + place.nbytes
            self._file_bytes[place.file] = max(end, self._file_bytes.get(place.file, 0))
        self._checked: dict[bytes, memoryview] = {}

    def __contains__(self, address: object) -> bool:
        return address in self._places

    def addresses(self) -> Iterable[bytes]:
        """Addresses of all values, in the order they were stored."""
        return self._places.keys()

    def get(self, address: bytes) -> memoryview:
        """The value's bytes (uint8, read-only), not copied.

        Raises:
            ValuesMissingError: no value has this address.
            TraceDamagedError: the bytes are not there, or are not those that were stored.
        """
        checked = self._checked.get(address)
        if checked is not None:
            return checked
        place = self._places.get(address)
        if place is None:
            raise ValuesMissingError(
                f"{self._path} holds no value with address {address.hex()}. Record again with values: "
                "ranklens record --payload all"
            )
        file = self._file(place.file)
        if min(place.offset, place.nbytes) < 0 or place.offset + place.nbytes > len(file):
            text = f"{self._file_bytes[place.file]} bytes were written, the file has {len(file)}"
            raise damaged(f"{self._path}/{payload_file(place.file)}", text)
        value = file[place.offset : place.offset + place.nbytes]
        if content_address(value) != address:
            text = f"bytes {place.offset} to {place.offset + place.nbytes} differ from their checksum"
            raise damaged(f"{self._path}/{payload_file(place.file)}", text)
        self._checked[address] = value
        return value

    def release(self, address: bytes) -> None:
        """Give the memory that a value takes back to the system; where it is needed again, it is read again.

        Does nothing for values that are not mapped (a remote trace's).
        """
        place = self._places.get(address)
        whole = self._files[place.file].obj if place is not None and place.file in self._files else None
        if place is not None and isinstance(whole, mmap.mmap) and place.nbytes:
            begin = place.offset - place.offset % FAULT_AROUND_BYTES
            end = min(len(whole), place.offset + place.nbytes + FAULT_AROUND_BYTES)
            whole.madvise(mmap.MADV_DONTNEED, begin, end - begin)

    def _file(self, number: int) -> memoryview:
        if number not in self._files:
            data = self._read(payload_file(number)) if number >= 0 else None
            if data is None:
                raise damaged(f"{self._path}/{payload_file(number)}", "the file is missing")
            self._files[number] = data
        return self._files[number]
