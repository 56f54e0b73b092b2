"""Whole jobs recorded and their ranks replayed alone: everything must be equal, to the last bit and digit.

``benchmarks/fidelity.py`` is the same over more programs and every rank; these are its rows, run by it.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from conftest import CASES, CliResult, run_command

REPOSITORY = Path(__file__).resolve().parents[1]
FIDELITY = REPOSITORY / "benchmarks" / "fidelity.py"

needs_cases = pytest.mark.skipif(
    not CASES.is_dir(),
    reason="the user programs (shared/cases beside the repository) are not on this machine",
)


def run_rows(name: str, ranks: str) -> CliResult:
    command = [sys.executable, str(FIDELITY), "--only", name, "--ranks", ranks]
    return run_command(command, timeout=240, cwd=REPOSITORY, env={"OMP_NUM_THREADS": "1"})


@pytest.mark.parametrize(
    ("row", "ranks"),
    [
        pytest.param("megatron TP2 PP2 DP2", "0,3,5,6", marks=needs_cases),
        pytest.param("zero stage 3, 4 ranks", "0,1,2,3", marks=needs_cases),
        pytest.param("pipe 2 stages, 4 ranks", "0,1,2,3", marks=needs_cases),
        pytest.param("ddp, 4 ranks", "0,1,2,3", marks=needs_cases),
        ("own tiny TP2", "0,1,2,3"),
        ("own megatron TP2 PP2", "0,3"),
    ],
)
def test_every_call_input_and_printed_digit_is_as_recorded(row: str, ranks: str) -> None:
    result = run_rows(row, ranks)
    count = ranks.count(",") + 1
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"{count} replays of 1 programs: all 100%" in result.stdout


def test_a_job_started_by_torchrun_with_a_relative_trace_directory(tmp_path: Path) -> None:
    program = str(CASES / "ddp.py" if CASES.is_dir() else REPOSITORY / "tests" / "programs" / "tiny.py")

    def run(module: str, *args: str) -> CliResult:
        return run_command([sys.executable, "-m", module, *args], timeout=240, cwd=tmp_path, env=None)

    ranklens = ("ranklens_core", "record", "--payload", "all", "--out", "runs/one", "--", program)
    recorded = run("torch.distributed.run", "--standalone", "--nproc-per-node", "4", "-m", *ranklens)
    assert recorded.returncode == 0, recorded.stderr
    for rank in (1, 2):
        verdict_file = tmp_path / f"verdict-{rank}.json"
        place = ("runs/one", "--rank", str(rank), "--verdict", str(verdict_file))
        replayed = run("ranklens_core", "replay", *place, "--", program)
        assert replayed.returncode == 0, replayed.stderr
        verdict = json.loads(verdict_file.read_text())
        structure, values = verdict["structure"], verdict["values"]
        assert structure["matched"] == structure["total"] > 0
        assert values["identical"] == values["compared"] > 0
        # torchrun's ranks share a pipe: the end of a line may come after another rank's line
        line = rf"rank {rank} step \d+ loss [\d.]+ grad_norm [\d.]+"
        printed = re.findall(line, recorded.stdout)
        assert printed
        assert re.findall(line, replayed.stdout) == printed
