"""Does a rank replayed alone keep the job's time: iterations of the plain job, recorded, and replayed.

    python benchmarks/timing_error.py                 every row of ROWS, about ten minutes on two cores
    python benchmarks/timing_error.py --only zero --repeats 2
    python benchmarks/timing_error.py --only virtual  8 to 64 ranks, virtual clock (--only 16: 16 ranks)

Two ranks, each on a core of its own. A repeat runs the plain job, records it, and replays both ranks alone,
side by side on the same cores: replaying one while the other core idles would be faster than the job, because
memory and cache are no longer shared. Figures are medians over the iterations after the first two, then over
the repeats. ``error`` is replayed against recorded, of the whole iteration and of its parts: communication is
what held the program (waiting and transfer), compute the rest. ``noise`` is the plain job against itself, the
largest difference of a repeat to the median of all.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from _iterations import CASES, PARTS, iterations, run, steady_ms
from _virtual_rows import virtual_rows

CORES = sorted(os.sched_getaffinity(0))[:2]

PLAIN = """
import sys, time
import ranklens_core.program as program
from ranklens_core.clock import MonotonicClock
from ranklens_core.cluster import run_local
from ranklens_core.preimport import guess_preimports
from ranklens_core.steps import OptimizerSteps, Steps
from ranklens_core.adapters import Adapters
from ranklens_core.standin import cpu_cuda_context, wants_cpu_cuda
import os
chosen = program.Program.parse(sys.argv[1:])
cores = sorted(os.sched_getaffinity(0))[:2]
def rank_main(rank):
    os.sched_setaffinity(0, {cores[rank]})
    ends = []
    steps = Steps(MonotonicClock(), lambda: None, ends.append)
    adapters, generic = Adapters(steps, strict=False), OptimizerSteps(steps)
    chosen.run()
    print("STEPS", rank, [step.end_ns - step.begin_ns for step in ends], flush=True)
    return 0
imports = guess_preimports(chosen)
with cpu_cuda_context(wants_cpu_cuda(False, imports)):
    sys.exit(run_local(2, rank_main, preimport=imports).status)
"""


@dataclass(frozen=True)
class Row:
    """A job of two ranks."""

    name: str
    program: str
    env: Mapping[str, str]


ROWS = (
    Row("zero stage 1", "deepspeed_zero.py", {"ZERO_STAGE": "1"}),
    Row("zero stage 2", "deepspeed_zero.py", {"ZERO_STAGE": "2"}),
    Row("zero stage 3", "deepspeed_zero.py", {"ZERO_STAGE": "3"}),
    Row("megatron TP2", "megatron_gpt.py", {"TP": "2", "PP": "1"}),
    Row("megatron PP2", "megatron_gpt.py", {"TP": "1", "PP": "2"}),
    Row("megatron DP2", "megatron_gpt.py", {"TP": "1", "PP": "1"}),
)


def environment(row: Row, steps: int) -> dict[str, str]:
    """The job's variables; one thread a rank, as each has one core."""
    return {
        **os.environ,
        **row.env,
        "HIDDEN": "256",
        "STEPS": str(steps),
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
    }


def plain(program: str, env: Mapping[str, str]) -> dict[int, list[int]]:
    """Iteration times in ns of each rank of the job without RankLens."""
    done = run([sys.executable, "-c", PLAIN, program], env)
    found = re.findall(r"STEPS (\d) (\[.*\])", done)
    return {int(rank): json.loads(times) for rank, times in found}


def record(program: str, env: Mapping[str, str], trace: Path) -> None:
    """Record the job, each rank on its core."""
    command = [sys.executable, "-m", "ranklens_core", "record", "--nproc", "2", "--pin", "--out", str(trace)]
    run([*command, "--", program], env)


def replay(program: str, env: Mapping[str, str], trace: Path) -> dict[int, dict[str, list[int]]]:
    """Both ranks alone, at the same time, each on its core: step times now and as recorded."""
    started = []
    for rank, core in enumerate(CORES):
        verdict = trace / f"verdict-{rank}.json"
        command = ["taskset", "-c", str(core), sys.executable, "-m", "ranklens_core", "replay", str(trace)]
        command += ["--rank", str(rank), "--task", "profile", "--verdict", str(verdict), "--", program]
        process = subprocess.Popen(
            command, env=dict(env), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        started.append((rank, process, verdict))
    found: dict[int, dict[str, list[int]]] = {}
    for rank, process, verdict in started:
        _, errors = process.communicate(timeout=600)
        if process.returncode:
            sys.exit(f"replay of rank {rank} failed:\n{errors[-3000:]}")
        found[rank] = iterations(verdict)
    return found


def measure(row: Row, repeats: int, steps: int) -> list[float]:
    """Print the row's figures; returns the errors of the iteration in percent, one a rank."""
    program, env = str(CASES / row.program), environment(row, steps)
    plains: list[float] = []
    replays: list[dict[int, dict[str, list[int]]]] = []
    for _ in range(repeats):
        with tempfile.TemporaryDirectory() as name:
            plains.append(steady_ms(plain(program, env)[0]))
            record(program, env, Path(name) / "trace")
            replays.append(replay(program, env, Path(name) / "trace"))
    middle = median(plains)
    noise = max(100 * abs(one - middle) / middle for one in plains)
    line = f"{row.name:<15}{middle:>8.1f}{shown(replays, 0, 'recorded step'):>10.1f}"
    line += f"{shown(replays, 0, 'step'):>10.1f}"
    errors = {part: [error_pct(replays, rank, part) for rank in (0, 1)] for part in PARTS}
    for part in PARTS:
        line += "  " + "".join(f"{error:>+7.1f}%" for error in errors[part])
    print(f"{line}{noise:>8.1f}%", flush=True)
    return errors["step"]


def shown(replays: Sequence[Mapping[int, Mapping[str, Sequence[int]]]], rank: int, what: str) -> float:
    return median(steady_ms(one[rank][what]) for one in replays)


def error_pct(replays: Sequence[Mapping[int, Mapping[str, Sequence[int]]]], rank: int, part: str) -> float:
    """Replayed against recorded, the median over the repeats of the difference of their medians."""
    pairs = [(steady_ms(one[rank][part]), steady_ms(one[rank][f"recorded {part}"])) for one in replays]
    return median(100 * (now - then) / then for now, then in pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", default="", help="rows whose name holds this text")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=32)
    args = parser.parse_args()
    if not CASES.is_dir():
        print("the user programs (shared/cases beside the repository) are not on this machine")
        return
    print(f"load average before the start {os.getloadavg()[0]:.2f}; iterations in ms, rank 0;")
    print("errors of ranks 0 and 1: the iteration, its communication, its compute")
    header = f"{'job':<15}{'plain':>8}{'recorded':>10}{'replayed':>10}"
    print(f"{header}{'iteration':>18}{'communication':>18}{'compute':>18}{'noise':>9}", flush=True)
    errors = [measure(row, args.repeats, args.steps) for row in ROWS if args.only in row.name]
    errors += [[error] for error in virtual_rows(args.only, max(2, args.repeats // 2), args.steps)]
    if not errors:
        print(f"no row has {args.only!r} in its name")
        return
    flat = [abs(error) for pair in errors for error in pair]
    rows = [sum(map(abs, pair)) / len(pair) for pair in errors]
    print(
        f"mean absolute error {sum(flat) / len(flat):.1f}% (aim 2%), worst row {max(rows):.1f}% (aim 5%), "
        f"worst rank {max(flat):.1f}%"
    )


if __name__ == "__main__":
    main()
