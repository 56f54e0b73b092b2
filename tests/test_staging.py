"""Values on their way to the disk are copies, whole, in memory that is used again."""

from __future__ import annotations

from pathlib import Path

import pytest

from ranklens_core.trace import open_trace
from ranklens_core.trace.payload import content_address
from ranklens_core.trace.staging import LARGEST_BLOCK_BYTES as BLOCK_BYTES
from ranklens_core.trace.staging import SMALL_BYTES, Staged, Staging, held_bytes
from tests import trace_samples as samples

SIZES = [0, 1, SMALL_BYTES - 1, SMALL_BYTES, BLOCK_BYTES, 3 * BLOCK_BYTES + 5]


def content(staged: Staged) -> bytes:
    return (staged.small + b"".join(staged.blocks))[: staged.nbytes]


@pytest.mark.parametrize("nbytes", SIZES)
def test_a_copy_is_whole_and_stays_when_the_original_changes(nbytes: int) -> None:
    original = bytearray(i % 251 for i in range(nbytes))
    wanted = bytes(original)
    staged = Staging(1 << 20).copy(memoryview(original))
    original[:] = bytes(nbytes)
    assert content(staged) == wanted
    assert staged.held_bytes == held_bytes(nbytes) >= nbytes


def test_released_memory_is_used_again_up_to_a_limit() -> None:
    staging = Staging(2 * BLOCK_BYTES)
    first = staging.copy(b"a" * (3 * BLOCK_BYTES))
    blocks = list(first.blocks)
    staging.release(first)
    second = staging.copy(b"b" * (3 * BLOCK_BYTES))
    again = [block for block in second.blocks if any(block is old for old in blocks)]
    assert (len(blocks), len(second.blocks), len(again)) == (3, 3, 2)
    assert content(second) == b"b" * (3 * BLOCK_BYTES)


def test_values_of_every_size_come_back_from_a_trace(tmp_path: Path) -> None:
    values = [bytes((i * 7 + size) % 253 for i in range(size)) for size in (*SIZES, 10, 70_001, *SIZES[4:])]
    values += [bytes(reversed(value)) for value in values]
    writer = samples.new_writer(tmp_path, max_pending_bytes=2 * BLOCK_BYTES)
    for number, value in enumerate(values):
        writer.store(content_address(value), value)
        if number % 5 == 0:
            writer.flush()
    writer.close(0)
    rank = open_trace(tmp_path).rank(0)
    for value in values:
        assert bytes(rank.values.get(content_address(value))) == value
