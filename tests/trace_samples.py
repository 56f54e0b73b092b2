"""Small records and traces for the tests of the trace."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from ranklens_core.clock import ManualClock
from ranklens_core.schema import (
    NO_PEER,
    CallRow,
    CompletionRow,
    EnvironmentItem,
    GroupRecord,
    Phase,
    Printed,
    Purpose,
    RunRecord,
    Signature,
    Step,
    WaitRow,
)
from ranklens_core.trace import (
    RankHeader,
    TraceWriter,
    content_address,
    open_trace,
    rank_directory,
    write_run,
)

RUN = RunRecord(
    format=1,
    oldest_reader=1,
    run_id="run-1",
    world_size=2,
    program="train.py",
    program_fingerprint="f",
    arguments=("--layers", "2"),
    framework="megatron",
    backend="gloo",
    created="2026-01-01T00:00:00Z",
    clock="wall",
    network="",
    cpu_cuda=False,
)

SIGNATURE = Signature(
    op="allreduce_",
    group="0-1#0",
    purpose=Purpose.TENSOR,
    peer=NO_PEER,
    reduce_op="SUM",
    tag=0,
    is_async=True,
    device="cpu",
    in_dtypes=("float32",),
    in_shapes=((2, 3),),
    out_dtypes=("float32",),
    out_shapes=((2, 3),),
    in_split_sizes=(),
    out_split_sizes=(),
    in_msg_bytes=24,
    out_msg_bytes=24,
    site="a.py:1 f",
    program_site="train.py:2 main",
)

GROUP = GroupRecord(key="0-1#0", pg_name="0", pg_desc="default_pg", backend="gloo", ranks=(0, 1))


def header(rank: int, **changes: Any) -> RankHeader:
    """The header of a rank with values."""
    start = RankHeader(
        rank=rank,
        host="host",
        pid=7,
        local_rank=rank,
        has_values=True,
        value_steps=None,
        monotonic_ns=1,
        realtime_ns=2,
    )
    return msgspec.structs.replace(start, **changes)


def call(entry: int, **changes: Any) -> CallRow:
    """A training call."""
    row = CallRow(
        entry=entry,
        signature=0,
        seq_id=entry,
        step=entry // 4,
        phase=Phase.STEP,
        training=True,
        batch=-1,
        enqueue_ns=10 * entry,
        start_ns=10 * entry + 1,
        compute_ns=5,
        compute_cpu_ns=4,
        in_addresses=(),
    )
    return msgspec.structs.replace(row, **changes)


def completion(entry: int, **changes: Any) -> CompletionRow:
    """The end of a call that went well."""
    row = CompletionRow(
        entry=entry, end_ns=10 * entry + 7, return_ns=0, src_rank=NO_PEER, out_addresses=(), error=""
    )
    return msgspec.structs.replace(row, **changes)


def value(number: int) -> bytes:
    """The bytes of a value; each number has other bytes and another length."""
    return bytes([number % 251]) * (100 + number)


def record_call(writer: TraceWriter, entry: int) -> None:
    """Record a call with signature 0 and its result ``value(entry)``."""
    data = value(entry)
    address = content_address(data)
    writer.call(call(entry, in_addresses=(address,)))
    writer.store(address, memoryview(data))
    writer.completion(completion(entry, out_addresses=(address,)))


def new_writer(directory: Path, rank: int = 0, **options: Any) -> TraceWriter:
    """A writer that flushes only when it is told to: its clock stands still."""
    start = options.pop("header", header(rank))
    return TraceWriter(directory, options.pop("run", RUN), start, clock=ManualClock(1), **options)


def write_rank(directory: Path, rank: int = 0, **options: Any) -> None:
    """A complete rank: 8 calls with values in 2 flushes, waits, and all kinds of journal line."""
    ranks = tuple(range(options.get("run", RUN).world_size))
    writer = new_writer(directory, rank, **options)
    writer.group(msgspec.structs.replace(GROUP, ranks=ranks))
    writer.environment(EnvironmentItem(kind="threads", name="OMP_NUM_THREADS", value="1"))
    writer.signature(SIGNATURE)
    for entry in range(8):
        if entry == 4:
            writer.role(GROUP.key, "dp")
            writer.step(Step(index=0, begin_ns=0, end_ns=40))
            writer.flush()
        record_call(writer, entry)
    writer.wait(WaitRow(entry=8, call=7, begin_ns=90, end_ns=91, compute_ns=3, compute_cpu_ns=2))
    writer.printed(Printed(name="loss", text="1.25"))
    writer.close(0)
    assert writer.failure == ""


def write_trace(directory: Path, world_size: int = 2) -> Path:
    """A complete trace of ``write_rank`` ranks; returns ``directory``."""
    run = msgspec.structs.replace(RUN, world_size=world_size)
    directory.mkdir(parents=True, exist_ok=True)
    write_run(directory, run)
    for rank in range(world_size):
        write_rank(directory, rank, run=run)
    return directory


def content(path: Path, world_size: int = 2) -> list[Any]:
    """All that a reader gets from a trace, values included."""
    with open_trace(path) as trace:
        ranks = [trace.rank(rank) for rank in range(world_size)]
        return [
            trace.run,
            trace.missing,
            *(
                (
                    rank.record,
                    rank.signatures,
                    list(rank.call_records()),
                    rank.waits.to_pylist(),
                    {address: bytes(rank.payload(address)) for address in rank.values.addresses()},
                )
                for rank in ranks
            ),
        ]


def rewrite(path: Path, change: Callable[[bytes], bytes]) -> None:
    """Replace a file by ``change`` of its bytes (a new file: the old one may be mapped)."""
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(change(data))


def journal_path(directory: Path, rank: int = 0) -> Path:
    """The journal of ``rank``."""
    return directory / rank_directory(rank) / "journal.jsonl"
