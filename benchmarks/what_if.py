"""Is a what-if right: half the bandwidth and twice the micro-batches, foretold for one rank alone, against a
recording of that very change.

    python benchmarks/what_if.py                  both jobs, about four minutes on two cores

Both recordings have the virtual clock, the rank a core of its own. The prediction never sees the changed job:
``tune`` replays the original recording with the changed program and ``--bandwidth 0.5``; ``emulate`` has no
recording at all. Figures are medians over the iterations after the first two; ``error`` is against the
recording of the change.
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

from _iterations import iterations, run, steady_ms

NETWORK = "loopback"
CORE = max(os.sched_getaffinity(0))
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

    def command(self, micro_batches: int) -> list[str]:
        return ["--", *self.program, self.micro_batches, str(micro_batches)]


JOBS = (
    Job(
        "zero stage 3, 8 ranks",
        8,
        5,
        ("-m", "ranklens_deepspeed.examples.zero", "--stage", "3", "--hidden-size", "256", "--steps", "20"),
        "--gradient-accumulation-steps",
    ),
    Job(
        "megatron TP2 DP4, 8 ranks",
        8,
        5,
        (
            "-m",
            "ranklens_megatron.examples.gpt",
            "--tp",
            "2",
            "--pp",
            "1",
            "--hidden-size",
            "256",
            "--steps",
            "20",
        ),
        "--num-microbatches",
    ),
)


def ranklens(*arguments: str, core: bool = False) -> None:
    """Run a command, on the rank's own core if ``core``; exits with its output if it fails."""
    command = [sys.executable, "-m", "ranklens_core", *arguments]
    if core:
        command = ["taskset", "-c", str(CORE), *command]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    run(command, env)


def record(job: Job, trace: Path, micro_batches: int, bandwidth: str) -> None:
    ranklens(
        "record", "--nproc", str(job.world), "--clock", "virtual", "--network", NETWORK,
        "--bandwidth", bandwidth, "--own-core", str(job.rank), "--payload", str(job.rank),
        "--out", str(trace), *job.command(micro_batches),
    )  # fmt: skip


def virtual_ms(job: Job, trace: Path, directory: Path, micro_batches: int) -> float:
    """The iteration of the recording's own virtual timeline."""
    verdict = directory / "recorded.json"
    ranklens(
        "replay", str(trace), "--rank", str(job.rank), "--task", "profile", "--verdict", str(verdict),
        *job.command(micro_batches), core=True,
    )  # fmt: skip
    return steady_ms(iterations(verdict)["recorded step"])


def foretold_ms(verdict: Path, *arguments: str) -> float:
    ranklens(*arguments[:1], "--verdict", str(verdict), *arguments[1:], core=True)
    return steady_ms([step["wall_ns"] for step in json.loads(verdict.read_text())["steps"]])


def measure(job: Job, repeats: int) -> list[float]:
    """Print the job's row; the errors of both predictions in percent."""
    with tempfile.TemporaryDirectory(prefix="ranklens-what-if-") as name:
        directory = Path(name)
        before, after = directory / "before", directory / "after"
        record(job, before, 2, "1")
        record(job, after, 4, "0.5")
        was_ms = virtual_ms(job, before, directory, 2)
        is_ms = virtual_ms(job, after, directory, 4)
        changed = ["--network", NETWORK, "--bandwidth", "0.5", *job.command(4)]
        rank = ["--rank", str(job.rank)]
        tune = ["replay", str(before), *rank, "--task", "tune", *changed]
        emulate = ["emulate", "--world-size", str(job.world), *rank, *changed]
        verdict = directory / "foretold.json"
        foretold = [
            median(foretold_ms(verdict, *command) for _ in range(repeats)) for command in (tune, emulate)
        ]
    errors = [100 * (one - is_ms) / is_ms for one in foretold]
    print(
        f"{job.name:<28}{was_ms:>10.1f}{is_ms:>10.1f}"
        + "".join(f"{one:>10.1f} {error:>+6.1f}%" for one, error in zip(foretold, errors, strict=True)),
        flush=True,
    )
    return errors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", default="", help="jobs whose name holds this text")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    print(f"iterations in ms, network {NETWORK}; load average before the start {os.getloadavg()[0]:.2f}")
    print(f"{'job':<28}{'original':>10}{'changed':>10}{'tune':>18}{'emulate':>18}", flush=True)
    errors = [measure(job, args.repeats) for job in JOBS if args.only in job.name]
    for place, way in enumerate(("tune", "emulate")):
        worst = max(abs(pair[place]) for pair in errors)
        print(f"{way} is off by {worst:.1f}% at most (aim {AIM_PCT:.0f}%)")


if __name__ == "__main__":
    main()
