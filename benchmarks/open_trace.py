"""Open a trace of a million calls, and read one rank's records: seconds and peak memory.

    python benchmarks/open_trace.py            64 ranks of 15,625 calls

Aim: opening takes under 2 s and under 300 MB. Each measurement runs in a process of its own; its memory is
that process's peak (VmHWM), interpreter and libraries included.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from _big_trace import in_fresh_process, rank_header, run_record

from ranklens_core.schema import (
    NO_PEER,
    CallRow,
    CompletionRow,
    GroupRecord,
    Phase,
    Purpose,
    RunRecord,
    Signature,
)
from ranklens_core.trace import TraceWriter

SHAPES = 40
"""Different signatures a rank has; a Megatron rank has about as many."""


def write_rank(directory: Path, run: RunRecord, rank: int, calls: int) -> None:
    """A rank of ``calls`` completed all-reduces."""
    writer = TraceWriter(directory, run, rank_header(rank, has_values=False))
    writer.group(
        GroupRecord(key="0-63", pg_name="0", pg_desc="default_pg", backend="nccl", ranks=tuple(range(64)))
    )
    for index in range(SHAPES):
        writer.signature(
            Signature(
                op="all_reduce",
                group="0-63",
                purpose=Purpose.TENSOR,
                peer=NO_PEER,
                reduce_op="sum",
                tag=0,
                is_async=True,
                device="cuda",
                in_dtypes=("bfloat16",),
                in_shapes=((1 + index, 4096),),
                out_dtypes=("bfloat16",),
                out_shapes=((1 + index, 4096),),
                in_split_sizes=(),
                out_split_sizes=(),
                in_msg_bytes=(1 + index) * 8192,
                out_msg_bytes=(1 + index) * 8192,
                site="layers.py:10 forward",
                program_site="train.py:20 main",
            )
        )
    for entry in range(calls):
        at_ns = entry * 100_000
        writer.call(
            CallRow(
                entry=entry,
                signature=entry % SHAPES,
                seq_id=entry,
                step=entry // 1000,
                phase=Phase.STEP,
                training=True,
                batch=-1,
                enqueue_ns=at_ns,
                start_ns=at_ns + 1000,
                compute_ns=50_000,
                compute_cpu_ns=50_000,
                in_addresses=(),
            )
        )
        writer.completion(
            CompletionRow(
                entry=entry,
                end_ns=at_ns + 50_000,
                return_ns=0,
                src_rank=NO_PEER,
                out_addresses=(),
                error="",
            )
        )
    writer.close(0)
    assert not writer.failure, writer.failure


OPEN = """
from ranklens_core.trace import open_trace
trace = open_trace(sys.argv[1])
calls = sum(trace.rank(rank).calls.num_rows for rank in trace.ranks)
if sys.argv[2] == "records":
    calls = sum(1 for _ in trace.rank(0).call_records())
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--calls", type=int, default=1_000_000, help="calls of all ranks together")
    args = parser.parse_args()
    run = run_record(args.ranks)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        began = time.perf_counter()
        for rank in range(args.ranks):
            write_rank(directory, run, rank, args.calls // args.ranks)
        print(f"wrote {args.calls:,} calls of {args.ranks} ranks in {time.perf_counter() - began:.0f} s")
        for what in ("open", "records"):
            seconds, peak_mb, (calls,) = in_fresh_process(OPEN, "print(calls)", name, what)
            label = "open, every rank's tables checked" if what == "open" else "and rank 0's records"
            print(f"{label:<36}{int(calls):>10,} calls {seconds:>7.2f} s {peak_mb:>7.0f} MB peak")


if __name__ == "__main__":
    main()
