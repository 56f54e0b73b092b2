"""What the benchmarks of time share: run a command, read the iterations that a replay's verdict tells of."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import IO

CASES = Path(__file__).resolve().parents[2] / "shared" / "cases"
WARM_UP = 2
PARTS = ("step", "communication", "compute")
CORES = sorted(os.sched_getaffinity(0))
OWN_CORE = CORES[-1]
"""Where ``record --own-core`` puts the one rank that has a core, and where it is replayed."""


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


@contextlib.contextmanager
def neighbours(world_size: int, program: Sequence[str], env: Mapping[str, str]) -> Iterator[None]:
    """The cores other than ``OWN_CORE`` compute meanwhile, each a rank of ``program`` (which must not end),
    emulated.

    While the job was recorded they did too. A rank that has memory and cache (on many machines the physical
    core) to itself computes up to 1.7 times as fast: that would be the machine, and not the method.
    """
    with contextlib.ExitStack() as undo:
        for core in CORES[:-1]:
            output = undo.enter_context(tempfile.TemporaryFile("w+"))
            command = ["taskset", "-c", str(core), sys.executable, "-m", "ranklens_core", "emulate"]
            command += ["--world-size", str(world_size), "--rank", "0", "--", *program]
            one = subprocess.Popen(command, env=dict(env), stdout=output, stderr=output)
            undo.callback(one.wait)
            undo.callback(one.kill)
            while "step" not in _written(output):
                if one.poll() is not None:
                    sys.exit(f"{' '.join(command)} failed:\n{_written(output)[-3000:]}")
                time.sleep(0.1)
        yield


def _written(file: IO[str]) -> str:
    file.seek(0)
    return file.read()
