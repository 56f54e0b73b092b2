"""The ranks of a trace are of one run: ranks of two jobs are told apart, and no old ones stay behind."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from conftest import RunCli, run_command
from trace_samples import GROUP, RUN, new_writer, write_trace

from ranklens_core.c10d.meeting import Meeting
from ranklens_core.cluster import _free_port
from ranklens_core.errors import TraceDamagedError, UsageError
from ranklens_core.trace import open_trace, remove_ranks_outside, verify

PROGRAM = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(2))
dist.destroy_process_group()
"""


def test_two_torchrun_jobs_on_one_port_are_two_runs(run_cli: RunCli, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    port = str(_free_port())
    for name in ("one", "two"):
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
        command += ["--master-port", port, "-m", "ranklens_core", "record", "--payload", "all", "--out", name]
        recorded = run_command([*command, "--", "program.py"], timeout=120, cwd=tmp_path, env=None)
        assert recorded.returncode == 0, recorded.stderr
        assert verify(tmp_path / name).ok
        assert run_cli("replay", name, "--rank", "1", "--", "program.py").returncode == 0
    one, two = (open_trace(tmp_path / name) for name in ("one", "two"))
    assert one.run.run_id == two.run.run_id  # or there would be nothing to tell apart
    assert one.journal(0).meeting == one.journal(1).meeting != two.journal(0).meeting
    shutil.rmtree(tmp_path / "two" / "rank-00001")
    shutil.copytree(tmp_path / "one" / "rank-00001", tmp_path / "two" / "rank-00001")
    for command in (("replay", "two", "--rank", "1", "--", "program.py"), ("verify", "two")):
        result = run_cli(*command)
        assert result.returncode == 5
        assert "two/rank-00001 and rank-00000 are of two runs" in result.stdout + result.stderr


def test_a_rank_that_met_nobody_is_of_any_run(tmp_path: Path) -> None:
    """It died before its first group, and holds no calls that could be mistaken."""
    for rank, meeting in enumerate(("", "aa", "", "aa")):
        writer = new_writer(tmp_path, rank, run=RUN)
        if meeting:
            writer.meeting(meeting)
        writer.close(0)
    trace = open_trace(tmp_path)
    assert [trace.journal(rank).meeting for rank in (0, 1)] == ["", "aa"]


def test_the_error_names_both_ranks(tmp_path: Path) -> None:
    for rank, meeting in enumerate(("aa", "bb")):
        writer = new_writer(tmp_path, rank)
        writer.meeting(meeting)
        writer.group(GROUP)
        writer.close(0)
    trace = open_trace(tmp_path)
    assert trace.rank(0).record.groups == (GROUP,)
    with pytest.raises(TraceDamagedError, match=r"rank-00001 and rank-00000 are of two runs.*\(bb, aa\)"):
        trace.rank(1)
    [problem] = verify(tmp_path).problems
    assert (problem.rank, "two runs" in problem.text) == (1, True)


class Mute(dist.Store):
    """A store of the program's own that knows nothing."""


def test_a_store_that_cannot_compare_is_no_obstacle() -> None:
    met: list[str] = []
    for store in (Mute(), dist.HashStore()):
        meeting = Meeting(met.append)
        # torch's own code goes on, and refuses what is asked of it here
        with pytest.raises(TypeError, match="Expected timeout argument"):
            c10d._new_process_group_helper(1, 0, [], "gloo", store, "name")
        meeting.remove()
    assert [len(found) for found in met] == [16]


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_smaller_job_leaves_no_ranks_of_a_larger_one(
    overwrite: bool, run_cli: RunCli, tmp_path: Path
) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    write_trace(tmp_path / "trace", world_size=4)
    shutil.rmtree(tmp_path / "trace" / "rank-00000")
    place = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    options = ["--payload", "all", "--out", "trace", *(["--overwrite"] if overwrite else [])]
    recorded = run_cli("record", *options, "--", "program.py", env=place)
    if overwrite:
        assert recorded.returncode == 0, recorded.stderr
        assert sorted(path.name for path in (tmp_path / "trace").iterdir()) == ["rank-00000", "run.json"]
        assert verify(tmp_path / "trace").ok
    else:
        assert (recorded.returncode, "rank-00001 of a larger job" in recorded.stderr) == (2, True)
        assert len(open_trace(tmp_path / "trace").found) == 3


def test_only_what_is_a_trace_is_removed(tmp_path: Path) -> None:
    write_trace(tmp_path, world_size=3)
    (tmp_path / "rank-00002" / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match=r"holds rank-00002/notes\.txt, which is no part of a trace"):
        remove_ranks_outside(tmp_path, 1, overwrite=True)
    assert len(open_trace(tmp_path).found) == 3
