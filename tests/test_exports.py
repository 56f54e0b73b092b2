"""The public Python API is a list, and works from inside a program."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ranklens_core as ranklens

PROGRAM = """
import os, sys
import torch, torch.distributed as dist
import ranklens_core as ranklens
mode, trace = sys.argv[1:]
def train():
    dist.init_process_group("gloo")
    value = torch.arange(4.0)
    dist.all_reduce(value)
    dist.destroy_process_group()
    return value.tolist()
if mode == "record":
    os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    with ranklens.record(trace, payload="all"):
        print(train())
else:
    with ranklens.replay(trace, rank=0, task="debug") as session:
        print(train())
    print(session.verdict.structure.matched, session.verdict.status)
"""

EMULATING = """
import torch, torch.distributed as dist
import ranklens_core as ranklens

with ranklens.emulate(world_size=256, rank=200, network="h100-ib400") as session:
    try:
        session.verdict
    except ranklens.RankLensError as error:
        print(error)
    dist.init_process_group("nccl")
    value = torch.ones(4)
    dist.all_reduce(value)
    print(dist.get_rank(), dist.get_world_size(), value.tolist())
    dist.destroy_process_group()
verdict: ranklens.Verdict = session.verdict
print(verdict.status, verdict.provenance.result["synthesised"], verdict.provenance.time["estimated"])
for refused in (
    lambda: ranklens.emulate(world_size=2, rank=2),
    lambda: ranklens.replay("nowhere", rank=0, on_mismatch="go on"),
):
    try:
        with refused():
            pass
    except ranklens.RankLensError as error:
        print(error)
"""


def test_the_public_names() -> None:
    assert ranklens.__all__ == [
        "RankLensError",
        "Trace",
        "Verdict",
        "emulate",
        "open_trace",
        "record",
        "replay",
    ]
    assert all(callable(getattr(ranklens, name)) for name in ranklens.__all__)
    assert all(getattr(ranklens, name).__doc__ for name in ranklens.__all__)
    assert set(ranklens.__all__) <= set(dir(ranklens))
    with pytest.raises(AttributeError, match="no attribute 'recrod'"):
        _ = ranklens.recrod


def test_recording_and_replaying_from_python(tmp_path: Path, run_python: Callable[..., Any]) -> None:
    recorded = run_python(PROGRAM, "record", "trace")
    assert (recorded.returncode, recorded.stdout) == (0, "[0.0, 1.0, 2.0, 3.0]\n"), recorded.stderr
    replayed = run_python(PROGRAM, "replay", "trace")
    assert (replayed.returncode, replayed.stdout) == (0, "[0.0, 1.0, 2.0, 3.0]\n1 ok\n"), replayed.stderr
    trace = ranklens.open_trace(tmp_path / "trace")
    assert trace.calls(rank=0).column("op").to_pylist() == ["all_reduce"]
    assert [group.ranks for group in trace.groups["0"]] == [(0,)]
    with pytest.raises(KeyError, match="no group or role 'tp' in this trace: it has 0"):
        trace.groups["tp"]
    assert trace.steps == {0: ()}


def test_emulating_from_python(run_python: Callable[..., Any]) -> None:
    status, stdout, stderr = run_python(EMULATING)
    assert status == 0, stderr
    assert stdout.splitlines() == [
        "There is no verdict yet: ask for it after the `with` block of the session.",
        "200 256 [256.0, 256.0, 256.0, 256.0]",
        "ok 1 1",
        "There is no rank 2 in a world of 2: give 0 <= --rank < --world-size.",
        "on_mismatch is 'go on'. Choices: stop, estimate, report.",
    ]


def test_importing_the_package_imports_no_torch(run_python: Callable[..., Any]) -> None:
    result = run_python("import sys, ranklens_core; ranklens_core.open_trace; print('torch' in sys.modules)")
    assert (result.returncode, result.stdout) == (0, "False\n"), result.stderr
