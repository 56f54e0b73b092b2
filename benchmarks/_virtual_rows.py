"""Rows of ``timing_error.py`` for jobs of 8 to 64 ranks: recorded with the virtual clock, one rank on a core
of its own, that rank then replayed alone in real time against the virtual timeline."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median

NETWORK = "h100-ib400"
WARM_UP = 2


@dataclass(frozen=True)
class VirtualRow:
    """A job of ``world`` ranks of which ``rank`` is replayed. Larger jobs train fewer steps: all ranks but
    one share the other cores."""

    name: str
    program: str
    world: int
    rank: int
    steps: int
    env: Mapping[str, str]


def _megatron(world: int, tp: int, pp: int, rank: int, steps: int) -> VirtualRow:
    name = f"megatron TP{tp} PP{pp} DP{world // (tp * pp)}"
    return VirtualRow(name, "megatron_gpt.py", world, rank, steps, {"TP": str(tp), "PP": str(pp)})


def _zero(world: int, rank: int, steps: int) -> VirtualRow:
    return VirtualRow("zero stage 3", "deepspeed_zero.py", world, rank, steps, {"ZERO_STAGE": "3"})


ROWS = (
    _megatron(8, 2, 2, 5, 30),
    _zero(8, 3, 30),
    _megatron(16, 2, 2, 9, 20),
    _zero(16, 9, 20),
    _megatron(32, 4, 2, 21, 14),
    _zero(32, 21, 14),
    _megatron(64, 4, 4, 37, 10),
    _zero(64, 37, 10),
)

HEADER = f"{'job':<24}{'ranks':>6}{'virtual':>10}{'replayed':>10}{'iteration':>11}{'comm.':>9}{'compute':>9}"


def measure(row: VirtualRow, program: Path, repeats: int) -> float:
    """Print the row; the error of the iteration in percent, the median over ``repeats`` replays."""
    env = {**os.environ, **row.env, "HIDDEN": "256", "STEPS": str(row.steps)}
    env |= {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    found: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory(prefix="ranklens-virtual-") as name:
        trace, verdict = Path(name) / "trace", Path(name) / "verdict.json"
        recording = ["record", "--nproc", str(row.world), "--clock", "virtual", "--network", NETWORK]
        recording += ["--own-core", str(row.rank), "--payload", str(row.rank), "--out", str(trace)]
        run([*recording, "--", str(program)], env)
        replaying = ["replay", str(trace), "--rank", str(row.rank), "--task", "profile"]
        for _ in range(repeats):
            run([*replaying, "--verdict", str(verdict), "--", str(program)], env, core=True)
            found.append(medians_ms(json.loads(verdict.read_text())["steps"]))
    error = {
        part: median(100 * (one[part] - one[f"recorded {part}"]) / one[f"recorded {part}"] for one in found)
        for part in ("step", "communication", "compute")
    }
    line = f"{row.name:<24}{row.world:>6}{median(one['recorded step'] for one in found):>10.1f}"
    line += f"{median(one['step'] for one in found):>10.1f}{error['step']:>+10.1f}%"
    print(f"{line}{error['communication']:>+8.1f}%{error['compute']:>+8.1f}%", flush=True)
    return error["step"]


def medians_ms(steps: list[dict[str, object]]) -> dict[str, float]:
    """Medians over the steps after the warm-up: the iteration and its parts, replayed and virtual."""
    found = {}
    for prefix, whole, key in (("", "wall_ns", "parts"), ("recorded ", "recorded_ns", "recorded_parts")):
        parts = [step[key] for step in steps[WARM_UP:]]
        waits = [part["wait_ns"] + part["transfer_ns"] for part in parts]  # type: ignore[index]
        found[f"{prefix}step"] = median(step[whole] for step in steps[WARM_UP:]) / 1e6  # type: ignore[type-var,operator]
        found[f"{prefix}communication"] = median(waits) / 1e6
        found[f"{prefix}compute"] = median(part["compute_ns"] for part in parts) / 1e6  # type: ignore[index]
    return found


def run(arguments: list[str], env: Mapping[str, str], *, core: bool = False) -> None:
    """Run a ranklens command, on one core if ``core``; exits with its output if it fails."""
    command = [sys.executable, "-m", "ranklens_core", *arguments]
    if core:
        command = ["taskset", "-c", str(max(os.sched_getaffinity(0))), *command]
    done = subprocess.run(command, env=dict(env), capture_output=True, text=True, timeout=1800)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}")
