"""Is a what-if right: half the bandwidth and twice the micro-batches, foretold for one rank alone, against a
recording of that very change.

    python benchmarks/what_if.py                  all jobs, about thirteen minutes on two cores

Both recordings have the virtual clock, the rank a core of its own. The prediction never sees the changed job:
``tune`` replays the original recording with the changed program and ``--bandwidth 0.5``; ``emulate`` has no
recording at all, and takes its peers to be as fast as the rank itself. With two ranks they are; of eight,
seven share a core, and ``waiting`` is how much of the changed iteration the rank waited for them: what an
emulation cannot know. A repeat makes both recordings and both predictions; figures are medians over the
iterations after the first two, then over the repeats. Errors are against the recording of the change.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from _iterations import OWN_CORE, iterations, neighbours, run, steady_ms

NETWORK = "loopback"
AIM_PCT = 8.0


@dataclass(frozen=True)
class Job:
    """A job of ``world`` ranks of which ``rank`` is foretold. ``micro_batches`` is the option that is doubled
    from 2 to 4."""

    name: str
    world: int
    rank: int
    program: tuple[str, ...]
    micro_batches: str

    def command(self, micro_batches: int, steps: int = 20) -> list[str]:
        return ["--", *self.program, "--steps", str(steps), self.micro_batches, str(micro_batches)]


def _zero(world: int, rank: int) -> Job:
    program = ("-m", "ranklens_deepspeed.examples.zero", "--stage", "3", "--hidden-size", "256")
    return Job(f"zero stage 3, {world} ranks", world, rank, program, "--gradient-accumulation-steps")


def _megatron(world: int, rank: int) -> Job:
    program = ("-m", "ranklens_megatron.examples.gpt", "--tp", "2", "--pp", "1", "--hidden-size", "256")
    return Job(f"megatron TP2 DP{world // 2}, {world} ranks", world, rank, program, "--num-microbatches")


JOBS = (_zero(2, 1), _megatron(2, 1), _zero(8, 5), _megatron(8, 5))
ENV = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}


def ranklens(*arguments: str, core: bool = False) -> None:
    """Run a command, on the rank's own core if ``core``; exits with its output if it fails."""
    command = [sys.executable, "-m", "ranklens_core", *arguments]
    if core:
        command = ["taskset", "-c", str(OWN_CORE), *command]
    run(command, ENV)


def record(job: Job, trace: Path, micro_batches: int, bandwidth: str) -> None:
    ranklens(
        "record", "--nproc", str(job.world), "--clock", "virtual", "--network", NETWORK,
        "--bandwidth", bandwidth, "--own-core", str(job.rank), "--payload", str(job.rank),
        "--out", str(trace), *job.command(micro_batches),
    )  # fmt: skip


def virtual_ms(job: Job, trace: Path, directory: Path, micro_batches: int) -> tuple[float, float]:
    """The iteration of the recording's own virtual timeline, and how much of it is waiting for peers."""
    verdict = directory / "recorded.json"
    ranklens(
        "replay", str(trace), "--rank", str(job.rank), "--task", "profile", "--verdict", str(verdict),
        *job.command(micro_batches), core=True,
    )  # fmt: skip
    waits = [step["recorded_parts"]["wait_ns"] for step in json.loads(verdict.read_text())["steps"]]
    return steady_ms(iterations(verdict)["recorded step"]), steady_ms(waits)


def foretold_ms(verdict: Path, *arguments: str) -> float:
    ranklens(*arguments[:1], "--verdict", str(verdict), *arguments[1:], core=True)
    return steady_ms([step["wall_ns"] for step in json.loads(verdict.read_text())["steps"]])


def predict(job: Job, directory: Path) -> dict[str, float]:
    """Record the job and its change, foretell the change: iterations in ms."""
    before, after = directory / "before", directory / "after"
    record(job, before, 2, "1")
    record(job, after, 4, "0.5")
    changed = ["--rank", str(job.rank), "--network", NETWORK, "--bandwidth", "0.5", *job.command(4)]
    verdict = directory / "foretold.json"
    with neighbours(job.world, job.command(2, steps=1_000_000)[1:], ENV):
        was_ms, _ = virtual_ms(job, before, directory, 2)
        is_ms, waiting_ms = virtual_ms(job, after, directory, 4)
        tune_ms = foretold_ms(verdict, "replay", str(before), "--task", "tune", *changed)
        emulate_ms = foretold_ms(verdict, "emulate", "--world-size", str(job.world), *changed)
    return {
        "original": was_ms, "changed": is_ms, "waiting": waiting_ms, "tune": tune_ms, "emulate": emulate_ms,
        "tune error": 100 * (tune_ms - is_ms) / is_ms, "emulate error": 100 * (emulate_ms - is_ms) / is_ms,
    }  # fmt: skip


def measure(job: Job, repeats: int) -> dict[str, float]:
    """Print the job's row, medians over the repeats; returns it."""
    rows = []
    for _ in range(repeats):
        with tempfile.TemporaryDirectory(prefix="ranklens-what-if-") as name:
            rows.append(predict(job, Path(name)))
    row = {key: median(one[key] for one in rows) for key in rows[0]}
    print(
        f"{job.name:<28}{row['original']:>10.1f}{row['changed']:>10.1f}{row['waiting']:>9.1f}"
        f"{row['tune']:>10.1f} {row['tune error']:>+6.1f}%"
        f"{row['emulate']:>10.1f} {row['emulate error']:>+6.1f}%",
        flush=True,
    )
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", default="", help="jobs whose name holds this text")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    print(f"iterations in ms, network {NETWORK}; load average before the start {os.getloadavg()[0]:.2f}")
    print(f"{'job':<28}{'original':>10}{'changed':>10}{'waiting':>9}{'tune':>18}{'emulate':>18}", flush=True)
    rows = [measure(job, args.repeats) for job in JOBS if args.only in job.name]
    for way in ("tune", "emulate"):
        worst = max(abs(row[f"{way} error"]) for row in rows)
        print(f"{way} is off by {worst:.1f}% at most (aim {AIM_PCT:.0f}%)")


if __name__ == "__main__":
    main()
