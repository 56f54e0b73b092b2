"""Real jobs that hang or break, recorded, ended in every way a job is ended, and diagnosed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from conftest import RunCli

from ranklens_core.diagnose import Diagnosis, diagnose
from ranklens_core.diagnose.findings import CallState, Status
from ranklens_core.trace import open_trace

FAULTS = Path(__file__).parent / "programs" / "faults.py"

HUNG_NS = 2_500_000_000
"""How long all ranks must have been silent before a job counts as hung."""

START_S = 120


def line_of(text: str) -> int:
    """The line of faults.py that has ``text``."""
    lines = FAULTS.read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if text in line)


def record_until_hung(tmp_path: Path, fault: str, nproc: int, ended_by: signal.Signals) -> Diagnosis:
    """Record a job that hangs, end it by ``ended_by`` once it does, diagnose."""
    out = tmp_path / "trace"
    command = [sys.executable, "-m", "ranklens_core", "record", "--nproc", str(nproc), "--out", str(out)]
    with subprocess.Popen(
        [*command, "--", str(FAULTS), fault], stderr=subprocess.PIPE, cwd=tmp_path, start_new_session=True
    ) as job:
        try:
            wait_until_hung(out, nproc, job)
            job.send_signal(ended_by)
            job.communicate(timeout=60)
        finally:
            job.kill()
    return diagnose(out)


def wait_until_hung(out: Path, nproc: int, job: subprocess.Popen[bytes]) -> None:
    """Return once every rank has said for a while that it lives, and nothing else."""
    until = time.monotonic() + START_S
    while time.monotonic() < until:
        assert job.poll() is None, job.communicate()
        journals = [out / f"rank-{rank:05d}" / "journal.jsonl" for rank in range(nproc)]
        if all(journal.exists() and silent_ns(journal) > HUNG_NS for journal in journals):
            return
        time.sleep(0.1)
    pytest.fail(f"the job did not hang within {START_S} s")


def silent_ns(journal: Path) -> int:
    """For how long a rank has had nothing to record."""
    lines = [
        json.loads(line[17:]) for line in journal.read_bytes().splitlines(keepends=True) if line[-1:] == b"\n"
    ]
    timed = [line for line in lines if line["kind"] in ("flush", "alive")]
    flushes = [line["time_ns"] for line in timed if line["kind"] == "flush"]
    return timed[-1]["time_ns"] - flushes[-1] if flushes else 0


@pytest.mark.parametrize("ended_by", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_all_send_before_they_receive(tmp_path: Path, ended_by: signal.Signals) -> None:
    found = record_until_hung(tmp_path, "swapped", 3, ended_by)
    assert (found.status, found.exit_status) == (Status.HANG, 3)
    assert found.cycle == found.culprits == (0, 1, 2)
    assert [(wait.ranks, wait.for_ranks) for wait in found.waits] == [
        ((0,), (1,)),
        ((1,), (2,)),
        ((2,), (0,)),
    ]
    for wait in found.waits:
        assert (wait.call.op, wait.call.state, wait.reason) == (
            "send",
            CallState.IN_FLIGHT,
            "did not receive",
        )
        assert wait.call.site == f"{FAULTS}:{line_of('dist.send(torch.ones(1 << 20)')} swapped"
        assert wait.waited_ns is not None
        assert wait.waited_ns >= HUNG_NS


def test_a_collective_on_some_ranks_only(tmp_path: Path) -> None:
    found = record_until_hung(tmp_path, "conditional", 4, signal.SIGKILL)
    assert (found.status, found.culprits) == (Status.STRUCTURE, (3,))
    (disagreement,) = found.disagreements
    assert [party.ranks for party in disagreement.parties] == [(0, 1, 2), (3,)]
    assert disagreement.parties[0].call.site.endswith(" report_metric")
    assert disagreement.parties[1].call.site.endswith(" train")
    assert dict(disagreement.fields)["reduce_op"] == "max on ranks 0-2; sum on rank 3"


def test_a_batch_less(tmp_path: Path) -> None:
    found = record_until_hung(tmp_path, "skips", 2, signal.SIGKILL)
    assert found.status is Status.STRUCTURE
    assert found.disagreements[0].fields == (("op", "all_reduce on rank 0; barrier on rank 1"),)


def test_a_rank_that_never_comes_back(tmp_path: Path) -> None:
    found = record_until_hung(tmp_path, "stuck", 3, signal.SIGTERM)
    assert (found.status, found.culprits) == (Status.HANG, (2,))
    where = f"{FAULTS}:{line_of('time.sleep')} read_from_disk"
    assert found.ends[2].place == where
    assert "rank 2 did not make the call: it was at programs/faults.py" in found.answer
    assert found.waits[0].ranks == (0, 1)


def test_who_waits_for_whom_through_messages_and_a_reduction(tmp_path: Path) -> None:
    found = record_until_hung(tmp_path, "pipeline", 4, signal.SIGKILL)
    assert (found.status, found.cycle) == (Status.HANG, (0, 1))
    assert {(wait.ranks, wait.for_ranks) for wait in found.waits} == {
        ((0,), (1, 2, 3)),
        ((1,), (0,)),
        ((2,), (1,)),
        ((3,), (2,)),
    }


def test_a_wait_in_progress_is_in_the_trace(tmp_path: Path) -> None:
    """gloo's receive is issued at once, and the program waits for it: that has no row before it ends."""
    record_until_hung(tmp_path, "pipeline", 2, signal.SIGKILL)
    with open_trace(tmp_path / "trace") as trace:
        rank = trace.rank(1)
        alive = rank.journal.alive
        assert alive is not None
        (call,) = alive.waiting
        assert rank.signatures[rank.calls["signature"][call].as_py()].op == "recv"
        assert call not in rank.completions["entry"].to_pylist()
        assert alive.place == f"{FAULTS}:{line_of('dist.recv(torch.empty(2)')} pipeline"


def broken(run_cli: RunCli, tmp_path: Path, *args: str) -> tuple[Diagnosis, dict[str, Any]]:
    """Record a job that ends by itself; its diagnosis, and that of the command line."""
    run_cli("record", "--nproc", "3", "--out", "trace", "--", FAULTS, *args)
    result = run_cli("diagnose", "trace", "--json", "found.json")
    found = diagnose(tmp_path / "trace")
    assert result.returncode == found.exit_status
    assert result.stdout.lower().startswith(found.answer[:60].lower())
    return found, json.loads((tmp_path / "found.json").read_bytes())


def test_a_rank_that_crashes(run_cli: RunCli, tmp_path: Path) -> None:
    found, as_json = broken(run_cli, tmp_path, "crashes")
    assert (found.status, found.culprits) == (Status.HANG, (2,))
    end = found.ends[2]
    assert (end.how, end.exit_status, end.error) == ("failed", 1, "ValueError: sample 17 has no label")
    assert end.place == f"{FAULTS}:{line_of('raise ValueError')} load_batch"
    assert end.last_call is not None
    assert (end.last_call.step, end.last_call.state) == (1, CallState.COMPLETED)
    assert [wait.for_ranks for wait in found.waits] == [(2,)]
    assert as_json["culprits"] == [2]


def test_shapes_that_do_not_match(run_cli: RunCli, tmp_path: Path) -> None:
    """gloo aborts the process in the very call: it must be on disk by then."""
    found, _ = broken(run_cli, tmp_path, "shapes")
    assert (found.status, found.culprits) == (Status.STRUCTURE, (2,))
    assert found.disagreements[0].fields == (
        ("input elements", "4 on ranks 0,1; 3 on rank 2"),
        ("output elements", "12 on ranks 0,1; 9 on rank 2"),
    )
    assert found.disagreements[0].parties[1].call.site.endswith(" shapes")


def test_a_rank_that_is_killed(run_cli: RunCli, tmp_path: Path) -> None:
    found, _ = broken(run_cli, tmp_path, "killed")
    assert found.culprits == (2,)
    assert (found.ends[2].how, found.ends[2].signal) == ("killed", signal.SIGKILL)
    assert found.answer.startswith("rank 2 was killed by signal 9 (SIGKILL)")


def test_a_job_that_ends_by_its_own_timeout(run_cli: RunCli, tmp_path: Path) -> None:
    found, _ = broken(run_cli, tmp_path, "stuck", "3")
    assert (found.status, found.culprits) == (Status.HANG, (2,))
    assert {rank for wait in found.waits for rank in wait.ranks} == {0, 1}
    assert "read_from_disk" in found.answer


def test_a_job_without_fault(run_cli: RunCli, tmp_path: Path) -> None:
    found, as_json = broken(run_cli, tmp_path, "none")
    assert (found.status, found.exit_status, found.waits) == (Status.OK, 0, ())
    assert found.values_compared >= 7
    assert as_json["status"] == "ok"
    as_flag = run_cli("diagnose", "--json", "trace")
    assert json.loads(as_flag.stdout)["status"] == "ok"


def test_a_trace_of_which_ranks_are_damaged(run_cli: RunCli, tmp_path: Path) -> None:
    broken(run_cli, tmp_path, "crashes")
    for rank, culprits in ((1, (2,)), (2, (1, 2)), (0, None)):
        (tmp_path / "trace" / f"rank-{rank:05d}" / "calls.arrows").write_bytes(b"no arrow")
        result = run_cli("diagnose", "trace", "--json")
        if culprits is None:
            assert result.returncode == 5
        else:
            found = json.loads(result.stdout)
            assert (result.returncode, found["ends"][rank]["how"]) == (3, "unreadable")
            assert tuple(found["culprits"]) == culprits


def test_bad_usage(run_cli: RunCli, tmp_path: Path) -> None:
    assert run_cli("diagnose").returncode == 2
    assert run_cli("diagnose", "nowhere").returncode == 5
    os.mkdir(tmp_path / "empty")
    assert run_cli("diagnose", "empty").returncode == 5
