"""Diagnose a hung job of 64 ranks and a million calls: seconds and peak memory.

    python benchmarks/diagnose.py            64 ranks of 15,625 calls

Aim: under 20 s and under 1 GB. The trace is like that of a TP4 x PP4 x DP4 training with values: collectives
of three kinds of group, messages between the pipeline's stages, and one rank that leaves out a call. The
measurement runs in a process of its own; its memory is that process's peak (VmHWM), interpreter and libraries
included.
"""

from __future__ import annotations

import argparse
import logging
import struct
import tempfile
import time
import zlib
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
from ranklens_core.text import ranks_text
from ranklens_core.trace import TraceWriter

STAGES = 4
STEP_CALLS = 125
"""Calls of a rank in one training step."""

ODD = 37
"""The rank that leaves out one call in the last step."""


class Rank:
    """Writes one rank, call by call."""

    def __init__(self, directory: Path, run: RunRecord, rank: int, world_size: int) -> None:
        self.rank = rank
        self.writer = TraceWriter(directory, run, rank_header(rank, has_values=True))
        part = world_size // STAGES
        self.stage, place = divmod(rank, part)
        tp = [self.stage * part + place // 4 * 4 + at for at in range(4)]
        dp = [self.stage * part + place % 4 + 4 * at for at in range(part // 4)]
        self.members = {"tp": tp, "dp": dp, "pp": [stage * part + place for stage in range(STAGES)]}
        self.groups = {role: ranks_text(ranks) for role, ranks in self.members.items()}
        for role, ranks in self.members.items():
            key = self.groups[role]
            self.writer.group(
                GroupRecord(key=key, pg_name=role, pg_desc="", backend="nccl", ranks=tuple(ranks), role=role)
            )
        self.signatures: dict[Signature, int] = {}
        self.seq_ids: dict[tuple[str, str, int], int] = {}
        self.entry = 0

    def call(self, op: str, role: str, size: int, line: int, step: int, peer: int, completes: bool) -> None:
        signature = Signature(
            op=op,
            group=self.groups[role],
            purpose=Purpose.TENSOR,
            peer=peer,
            reduce_op="sum" if "reduce" in op else "",
            tag=0,
            is_async=True,
            device="cuda",
            in_dtypes=() if op == "recv" else ("bfloat16",),
            in_shapes=() if op == "recv" else ((size, 64),),
            out_dtypes=() if op == "send" else ("bfloat16",),
            out_shapes=() if op == "send" else ((size, 64),),
            in_split_sizes=(),
            out_split_sizes=(),
            in_msg_bytes=size * 128,
            out_msg_bytes=size * 128,
            site=f"layers.py:{line} forward",
            program_site=f"train.py:{line} main",
        )
        number = self.signatures.get(signature)
        if number is None:
            number = self.signatures[signature] = self.writer.signature(signature)
        lane = (self.groups[role], op if op in ("send", "recv") else "", peer)
        seq_id = self.seq_ids[lane] = self.seq_ids.get(lane, -1) + 1
        at_ns = self.entry * 100_000 + 1000 * (self.rank % 7)
        # what a call moves is known by its place alone: the same on all members, another one each time
        address = struct.pack(">QQ", zlib.crc32(self.groups[role].encode()), seq_id + 1)
        self.writer.call(
            CallRow(
                entry=self.entry,
                signature=number,
                seq_id=seq_id,
                step=step,
                phase=Phase.STEP,
                training=True,
                batch=-1,
                enqueue_ns=at_ns,
                start_ns=at_ns + 1000,
                compute_ns=50_000,
                compute_cpu_ns=50_000,
                delayed_ns=0,
                in_addresses=(address,) if op != "recv" else (),
            )
        )
        if completes:
            self.writer.completion(
                CompletionRow(
                    entry=self.entry,
                    end_ns=at_ns + 50_000,
                    return_ns=0,
                    src_rank=NO_PEER,
                    out_addresses=(address,) if op != "send" else (),
                    error="",
                )
            )
        self.entry += 1


def write_rank(directory: Path, run: RunRecord, rank: int, calls: int) -> None:
    """A rank whose last step hangs because rank ``ODD`` leaves out a call of its tensor-parallel group."""
    log = Rank(directory, run, rank, run.world_size)
    steps = max(1, calls // STEP_CALLS)
    for step in range(steps):
        for at in range(STEP_CALLS):
            is_last = step == steps - 1 and at >= STEP_CALLS // 2
            if at % 25 == 0 and log.stage:
                log.call("recv", "pp", 32, 10, step, log.stage - 1, True)
            elif at % 25 == 1 and log.stage < STAGES - 1:
                log.call("send", "pp", 32, 11, step, log.stage + 1, True)
            elif at % 25 == 2:
                log.call("reduce_scatter_tensor", "dp", 64, 12, step, NO_PEER, True)
            elif is_last and rank == ODD and at == STEP_CALLS // 2:
                continue
            else:
                stuck = is_last and ODD in log.members["tp"]
                log.call("all_reduce", "tp", 1 + at % 5, 20 + at % 5, step, NO_PEER, not stuck)
                if stuck:
                    break
    log.writer.fail("the job hangs here")
    log.writer.close(None)


DIAGNOSE = """
from ranklens_core.diagnose import diagnose
found = diagnose(sys.argv[1])
"""
TELL = """
print(found.culprits, sum(end.calls for end in found.ends))
print(found.answer)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--ranks", type=int, default=64, help="a multiple of 16")
    parser.add_argument("--calls", type=int, default=1_000_000, help="calls of all ranks together")
    args = parser.parse_args()
    logging.getLogger("ranklens.trace").setLevel(logging.CRITICAL)  # each rank says that it was cut off
    run = run_record(args.ranks)
    with tempfile.TemporaryDirectory() as name:
        began = time.perf_counter()
        for rank in range(args.ranks):
            write_rank(Path(name), run, rank, args.calls // args.ranks)
        print(f"wrote {args.ranks} ranks in {time.perf_counter() - began:.0f} s")
        seconds, peak_mb, (rest, *answer) = in_fresh_process(DIAGNOSE, TELL, name)
        print(f"diagnosed in {seconds:.1f} s, {peak_mb:.0f} MB peak; culprits, calls: {rest}")
        print("\n".join(answer))


if __name__ == "__main__":
    main()
