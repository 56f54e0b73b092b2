"""What the benchmarks of large traces share: the run, its ranks, and measuring in a fresh process."""

from __future__ import annotations

import subprocess
import sys

from ranklens_core.schema import RunRecord
from ranklens_core.trace import RankHeader


def run_record(world_size: int) -> RunRecord:
    return RunRecord(
        format=1,
        oldest_reader=1,
        run_id="benchmark",
        world_size=world_size,
        program="train.py",
        program_fingerprint="",
        arguments=(),
        framework="",
        backend="nccl",
        created="",
        clock="wall",
        network="",
        cpu_cuda=False,
    )


def rank_header(rank: int, *, has_values: bool) -> RankHeader:
    return RankHeader(
        rank=rank,
        host="host",
        pid=1,
        local_rank=rank,
        has_values=has_values,
        value_steps=None,
        monotonic_ns=0,
        realtime_ns=0,
    )


_AROUND = """
import sys, time
began = time.perf_counter()
{code}
seconds = time.perf_counter() - began
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(seconds, int(peak.split()[1]) / 1024)
{tell}
"""


def in_fresh_process(code: str, tell: str, *arguments: str) -> tuple[float, float, list[str]]:
    """Seconds that ``code`` takes in a process of its own, that process's peak in MB (interpreter and
    libraries included), and the lines that ``tell`` then prints. ``arguments`` are in ``sys.argv[1:]``."""
    command = [sys.executable, "-c", _AROUND.format(code=code, tell=tell), *arguments]
    first, *lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    seconds, peak_mb = first.split()
    return float(seconds), float(peak_mb), lines
