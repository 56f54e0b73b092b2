"""Every 8-rank target is recorded on this machine, and a rank of it replayed; 16 ranks as one sweep."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from conftest import RunCli

from ranklens_core.cli.run import options_of
from ranklens_core.run.compose import compose_run

RANK = 5


def eight_ranks() -> list[str]:
    names = [name for name, _ in options_of("target") if name != "own"]
    return [name for name in names if compose_run([f"target={name}"])[0].config.target.world_size == 8]


@pytest.mark.parametrize("target", eight_ranks())
def test_an_8_rank_target_runs(target: str, run_cli: RunCli, tmp_path: Path) -> None:
    result = run_cli("run", f"target={target}", f"rank={RANK}", "workload.options.steps=2")
    assert result.returncode == 0, result.stderr
    (file,) = tmp_path.glob("ranklens-runs/runs/*/verdict.json")
    verdict = json.loads(file.read_text())
    structure, values = verdict["structure"], verdict["values"]
    assert (verdict["rank"], verdict["world_size"], verdict["status"]) == (RANK, 8, "ok")
    assert structure["matched"] == structure["total"] > 0
    assert values["identical"] == values["compared"] > 0
    assert verdict["printed"]["identical"] == verdict["printed"]["compared"] > 0


def test_a_sweep_over_ranks_of_16(run_cli: RunCli) -> None:
    result = run_cli("run", "-m", "target=deepspeed_zero3_16", "rank=0,7,15", "workload.options.steps=2")
    assert result.returncode == 0, result.stderr
    lines = result.stderr.splitlines()
    first = next(index for index, line in enumerate(lines) if line.startswith("rank   roles"))
    for rank, line in zip((0, 7, 15), lines[first + 1 :], strict=False):
        cells = line.split()
        assert cells[:3] == [str(rank), "dp", f"{rank}/16"]
        matched, total = cells[-3].split("/")
        identical, compared = cells[-2].split("/")
        assert (matched, identical, cells[-1]) == (total, compared, "ok")
