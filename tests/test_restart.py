"""Replays that start from the program's own checkpoint, at a step of a job that ran longer."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest


def ranklens(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ranklens_core", *arguments], cwd=cwd, text=True, capture_output=True
    )


def recorded(cwd: Path, ranks: int, program: Sequence[str], *options: str) -> Path:
    saving = [*program, "--steps", "5", "--save", "checkpoint", "--save-step", "2"]
    result = ranklens(
        "record", "--nproc", str(ranks), "--out", "trace", "--steps", "2:4", *options, "--", *saving, cwd=cwd
    )
    assert result.returncode == 0, result.stderr
    return cwd / "trace"


def restarted(cwd: Path, rank: int, program: Sequence[str], *options: str) -> tuple[int, dict[str, Any]]:
    loading = [*program, "--steps", "5", "--load", "checkpoint"]
    arguments = [
        "replay",
        "trace",
        "--rank",
        str(rank),
        "--verdict",
        "verdict.json",
        *options,
        "--",
        *loading,
    ]
    result = ranklens(*arguments, cwd=cwd)
    assert (cwd / "verdict.json").stat().st_size, result.stderr
    return result.returncode, json.loads((cwd / "verdict.json").read_text())


MEGATRON = ("-m", "ranklens_megatron.examples.gpt", "--pp", "2")
ZERO = ("-m", "ranklens_deepspeed.examples.zero", "--stage")


@pytest.mark.parametrize(
    ("program", "ranks", "rank"),
    [((*MEGATRON, "--tp", "2"), 8, 5), ((*ZERO, "1"), 2, 1), ((*ZERO, "2"), 4, 3)],
    ids=["megatron", "zero1", "zero2"],
)
def test_a_replay_from_the_checkpoint_has_the_recorded_values(
    program: Sequence[str], ranks: int, rank: int, tmp_path: Path
) -> None:
    trace = recorded(tmp_path, ranks, program, "--window-only")
    status, verdict = restarted(tmp_path, rank, program, "--from-step", "2")
    assert (status, verdict["status"]) == (0, "ok")
    structure, values = verdict["structure"], verdict["values"]
    assert structure["training_matched"] == structure["training_total"] > 0
    assert structure["matched"] == structure["total"]
    assert values["identical"] == values["compared"] > 0
    printed = verdict["printed"]
    assert printed["identical"] == printed["compared"] == 4, "loss and grad norm of the steps 2 and 3"
    assert "started with step 2" in verdict["message"]
    assert [step["index"] for step in verdict["steps"]] == [2, 3]
    info = json.loads(ranklens("info", str(trace), "--json", cwd=tmp_path).stdout)
    assert info["window_only"] is True


def test_from_its_start_it_says_which_checkpoint_it_needs(tmp_path: Path) -> None:
    program = (*ZERO, "1")
    recorded(tmp_path, 2, program, "--window-only")
    result = ranklens("replay", "trace", "--rank", "1", "--", *program, "--steps", "5", cwd=tmp_path)
    assert result.returncode == 5
    assert "replay with --from-step 2" in result.stderr


def test_a_wrong_checkpoint_is_a_divergence(tmp_path: Path) -> None:
    program = (*ZERO, "1")
    recorded(tmp_path, 2, program)
    other = [*program, "--steps", "5", "--save", "checkpoint", "--save-step", "2", "--lr", "0.1"]
    assert ranklens("record", "--nproc", "2", "--out", "other", "--", *other, cwd=tmp_path).returncode == 0
    status, verdict = restarted(tmp_path, 1, program, "--from-step", "2")
    assert (status, verdict["status"]) == (4, "values-diverged")
    assert verdict["values"]["first_divergence"]["step"] == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--from-step", "1"], "has values of the steps 2 to 3"),
        (["--from-step", "9"], "was recorded in the steps 0 to 4"),
        (["--from-step", "2", "--task", "profile"], "--from-step is not for --task profile"),
    ],
)
def test_a_step_that_cannot_be(options: list[str], message: str, tmp_path: Path) -> None:
    program = (*ZERO, "1")
    recorded(tmp_path, 2, program)
    result = ranklens("replay", "trace", "--rank", "0", *options, "--", *program, cwd=tmp_path)
    assert result.returncode == 2
    assert message in result.stderr


def test_window_only_needs_a_later_window(tmp_path: Path) -> None:
    result = ranklens("record", "--nproc", "2", "--window-only", "--", "train.py", cwd=tmp_path)
    assert result.returncode == 2
    assert "--steps A:B with A above 0" in result.stderr
