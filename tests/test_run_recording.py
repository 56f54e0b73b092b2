"""``ranklens run`` records a target once; a trace is used again only if it is of the same job."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import CliResult, RunCli

from ranklens_core.trace import open_trace

TINY = Path(__file__).parent / "programs" / "tiny.py"
RUN = ("run", "target=own", "target.world_size=2", "workload=own", f"workload.program={TINY}", "trace=trace")

Run = Callable[..., CliResult]


@pytest.fixture
def run(run_cli: RunCli) -> Run:
    return lambda *overrides: run_cli(*RUN, *overrides)


def created(directory: Path) -> str:
    with open_trace(directory / "trace") as trace:
        return trace.run.run_id


def test_recorded_once_then_replayed(run: Run, tmp_path: Path) -> None:
    first = run("rank=1")
    assert first.returncode == 0, first.stderr
    assert f"$ ranklens record --nproc 2 --out trace -- {TINY}" in first.stderr
    assert "$ ranklens replay trace --rank 1 --verdict ranklens-runs/runs/" in first.stderr
    assert "rank 1 of 2" in first.stderr
    run_id = created(tmp_path)
    again = run("rank=0", "record=never")
    assert again.returncode == 0, again.stderr
    assert "ranklens record" not in again.stderr
    assert created(tmp_path) == run_id
    anew = run("rank=0", "record=again")
    assert anew.returncode == 0, anew.stderr
    assert f"$ ranklens record --nproc 2 --out trace --overwrite -- {TINY}" in anew.stderr
    assert created(tmp_path) != run_id


def test_nothing_starts_when_something_is_wrong(run: Run, tmp_path: Path) -> None:
    for override, status, message in (
        ("record=never", 5, "there is no trace at trace, and record=never does not record one"),
        ("rank=2", 2, "rank is 2. Allowed: the ranks of target own_2, 0 to 1"),
        ("rnak=1", 2, "Could not override 'rnak'"),
        ("target=nothing", 2, "Could not find 'target/nothing'"),
        ("workload.program=no.py", 2, "workload.program: no.py: no such program file"),
    ):
        result = run(override)
        assert (result.returncode, message in result.stderr) == (status, True), result.stderr
        assert "Traceback" not in result.stderr
        assert not list(tmp_path.iterdir())


def test_a_trace_of_another_job_is_not_used(run: Run, tmp_path: Path) -> None:
    assert run().returncode == 0
    other = tmp_path / "other.py"
    other.write_text(TINY.read_text())
    for overrides, difference in (
        (["workload.arguments=[--lr]"], "its program had the arguments ``, not `--lr`"),
        ([f"workload.program={other}"], f"it is of `{TINY}`, not of `{other}`"),
        (["target.world_size=4"], "it has 2 ranks, target own_4 has 4"),
        (["+workload.environment.WIDTH=16"], "WIDTH was unset, not 16"),
        (["record=virtual"], "recorded with the wall clock, not the virtual clock (h100-ib400)"),
    ):
        result = run(*overrides)
        assert result.returncode == 2, result.stderr
        assert "the trace trace is of another job" in result.stderr
        assert difference in result.stderr
        assert "record=again replaces it, trace=DIR keeps both" in result.stderr
        assert "$ ranklens" not in result.stderr


def test_a_job_that_fails_while_it_is_recorded(run: Run) -> None:
    failing = "+workload.environment.FAIL=raise"
    result = run(failing)
    assert result.returncode == 1, result.stderr
    assert "the job failed with status 1 while it was recorded" in result.stderr
    assert "ranklens replay" not in result.stderr
    result = run(failing)
    assert result.returncode == 5
    assert "the recording in trace ended with status 1" in result.stderr
    result = run(failing, "record=never", "rank=0")
    assert "$ FAIL=raise ranklens replay trace --rank 0" in result.stderr


def test_a_sweeps_jobs_cannot_share_a_trace_of_different_jobs(run_cli: RunCli) -> None:
    result = run_cli("run", "-m", *RUN[1:], "+workload.environment.WIDTH=8,16")
    assert result.returncode == 2
    assert "the sweep's jobs want different recordings in trace" in result.stderr


def test_two_at_once_record_once(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ranklens_core", *RUN]
    both = [
        subprocess.Popen(
            [*command, f"rank={rank}"],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=dict(os.environ),
        )
        for rank in (0, 1)
    ]
    said = [process.communicate()[0] for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    assert sum("$ ranklens record" in text for text in said) == 1, said
