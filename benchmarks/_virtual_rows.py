"""The rows of ``timing_error.py`` with a virtual clock: 8 to 64 ranks recorded on two cores.

The survivor has one core, all other ranks the other. Its iterations, replayed alone on its core in real time,
are compared with those of the virtual timeline: transfers of the network ``loopback`` on the recorded compute
of all ranks. A recording is replayed several times; ``spread`` is the largest difference of a replay's median
to the median of all.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from _iterations import CASES, CORES, OWN_CORE, PARTS, iterations, neighbours, run, steady_ms

NETWORK = "loopback"


@dataclass(frozen=True)
class VirtualRow:
    """A job of many ranks, of which ``survivor`` is replayed."""

    name: str
    ranks: int
    survivor: int
    program: str
    env: Mapping[str, str]


def _megatron(ranks: int, tp: int, pp: int, survivor: int) -> VirtualRow:
    name = f"TP{tp} PP{pp} DP{ranks // tp // pp}"
    return VirtualRow(
        f"virtual megatron {name}", ranks, survivor, "megatron_gpt.py", {"TP": f"{tp}", "PP": f"{pp}"}
    )


def _zero(ranks: int, stage: int, survivor: int) -> VirtualRow:
    return VirtualRow(
        f"virtual zero stage {stage}", ranks, survivor, "deepspeed_zero.py", {"ZERO_STAGE": f"{stage}"}
    )


VIRTUAL_ROWS = (
    _megatron(8, 2, 2, 5),
    _zero(8, 3, 5),
    _megatron(16, 2, 2, 9),
    _zero(16, 1, 9),
    _megatron(32, 4, 2, 17),
    _zero(32, 2, 17),
    _megatron(64, 4, 4, 37),
    _zero(64, 1, 37),
)


def virtual_rows(only: str, repeats: int, steps: int) -> list[float]:
    """Print the rows whose name has ``only`` in it, or that have so many ranks; iteration errors in pct.

    ``repeats`` replays of one recording of ``steps`` iterations each.
    """
    rows = [row for row in VIRTUAL_ROWS if only in row.name or only == str(row.ranks)]
    if not rows:
        return []
    if len(CORES) < 2:
        print("virtual clock: one core for the survivor and one for the others are needed")
        return []
    print(f"\nvirtual clock, network {NETWORK}; errors of the survivor: iteration, communication, compute")
    header = f"{'job':<30}{'ranks':>6}{'virtual':>9}{'replayed':>10}{'spread':>8}"
    print(f"{header}{'iteration':>11}{'communication':>15}{'compute':>9}{'each iteration':>16}", flush=True)
    with tempfile.TemporaryDirectory() as name:
        return [_measure(row, repeats, steps, Path(name)) for row in rows]


def _measure(row: VirtualRow, repeats: int, steps: int, directory: Path) -> float:
    program, trace = str(CASES / row.program), directory / "trace"
    env = _environment(row, steps, directory)
    ranklens = [sys.executable, "-m", "ranklens_core"]
    record = ["record", "--nproc", str(row.ranks), "--clock", "virtual", "--network", NETWORK, "--overwrite"]
    record += ["--own-core", str(row.survivor), "--payload", str(row.survivor), "--out", str(trace)]
    run([*ranklens, *record, "--", program], env)
    with neighbours(row.ranks, [program], {**env, "STEPS": "1000000"}):
        replays = [_replay(row, program, trace, env) for _ in range(repeats)]
    times = [steady_ms(one["step"]) for one in replays]
    middle = median(times)
    spread = max(100 * abs(one - middle) / middle for one in times)
    then = {part: steady_ms(replays[0][f"recorded {part}"]) for part in PARTS}
    errors = {
        part: median(100 * (steady_ms(one[part]) - then[part]) / then[part] for one in replays)
        for part in PARTS
    }
    each = median(_each_pct(one["step"], one["recorded step"]) for one in replays)
    print(
        f"{row.name:<30}{row.ranks:>6}{then['step']:>9.1f}{middle:>10.1f}{spread:>7.1f}%"
        f"{errors['step']:>+10.1f}%{errors['communication']:>+14.1f}%{errors['compute']:>+8.1f}%{each:>15.1f}%",
        flush=True,
    )
    return errors["step"]


def _environment(row: VirtualRow, steps: int, directory: Path) -> dict[str, str]:
    return {
        **os.environ,
        **row.env,
        "HIDDEN": "128",
        "STEPS": str(steps),
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
        # DeepSpeed builds an extension when it starts, under a lock; once for all rows
        "TORCH_EXTENSIONS_DIR": str(directory / "extensions"),
    }


def _replay(row: VirtualRow, program: str, trace: Path, env: Mapping[str, str]) -> dict[str, list[int]]:
    verdict = trace.parent / "verdict.json"
    command = ["taskset", "-c", str(OWN_CORE), sys.executable, "-m", "ranklens_core", "replay", str(trace)]
    command += ["--rank", str(row.survivor), "--task", "profile", "--verdict", str(verdict), "--", program]
    run(command, env)
    return iterations(verdict)


def _each_pct(now: list[int], then: list[int]) -> float:
    """Each iteration against its own: the median absolute error."""
    pairs = list(zip(now, then, strict=True))[2:]
    return median(100 * abs(one - other) / other for one, other in pairs)
