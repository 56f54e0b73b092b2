"""What the benchmarks of time share: run a command, read the iterations that a replay's verdict tells of."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

CASES = Path(__file__).resolve().parents[2] / "shared" / "cases"
WARM_UP = 2
PARTS = ("step", "communication", "compute")


def run(command: Sequence[str], env: Mapping[str, str]) -> str:
    """The output of ``command``; exits with it if the command fails."""
    done = subprocess.run(command, env=dict(env), capture_output=True, text=True, timeout=900)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}")
    return done.stdout


def steady_ms(times_ns: Sequence[int]) -> float:
    """Median of the iterations after the warm-up, in ms."""
    return median(times_ns[WARM_UP:]) / 1e6


def iterations(verdict: Path) -> dict[str, list[int]]:
    """Each iteration and its parts (``PARTS``) in ns, replayed and, as ``recorded PART``, in the recording's
    clock."""
    steps = json.loads(verdict.read_text())["steps"]
    found = {}
    for prefix, whole, key in (("", "wall_ns", "parts"), ("recorded ", "recorded_ns", "recorded_parts")):
        parts = [step[key] for step in steps]
        found[f"{prefix}step"] = [step[whole] for step in steps]
        found[f"{prefix}communication"] = [one["wait_ns"] + one["transfer_ns"] for one in parts]
        found[f"{prefix}compute"] = [one["compute_ns"] for one in parts]
    return found
