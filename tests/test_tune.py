"""Task tune: as recorded where the program still does what it did, estimated where it was changed."""

from __future__ import annotations

import json
from pathlib import Path

from conftest import RunCli

PROGRAM = (
    "import os, torch, torch.distributed as dist\n"
    "dist.init_process_group('gloo')\n"
    "model = torch.nn.Linear(8, 8, bias=bool(os.environ.get('BIAS', '1')))\n"
    "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
    "for step in range(3):\n"
    "    model(torch.ones(1, 8)).sum().backward()\n"
    "    for parameter in model.parameters():\n"
    "        dist.all_reduce(parameter.grad)\n"
    "    for _ in range(int(os.environ.get('MORE', '0'))):\n"
    "        dist.all_reduce(torch.ones(1000))\n"
    "    optimizer.step()\n"
    "    optimizer.zero_grad()\n"
    "dist.barrier()\n"
    "dist.destroy_process_group()\n"
)


def test_what_was_changed_is_estimated_and_the_rest_is_recorded(run_cli: RunCli, tmp_path: Path) -> None:
    program, trace, file = tmp_path / "train.py", tmp_path / "trace", tmp_path / "verdict.json"
    program.write_text(PROGRAM)
    assert run_cli("record", "--nproc", "2", "--out", trace, "--", program).returncode == 0
    replay = ("replay", trace, "--rank", "1", "--task", "tune", "--verdict", file)

    same = run_cli(*replay, "--", program)
    verdict = json.loads(file.read_text())
    assert (same.returncode, verdict["status"]) == (0, "ok"), same.stderr
    assert verdict["provenance"]["result"] == {"recorded": 7, "synthesised": 0}
    assert verdict["provenance"]["time"] == {"recorded": 7, "estimated": 0, "none": 0}

    changed = run_cli(*replay, "--network", "loopback", "--", program, env={"MORE": "1"})
    verdict = json.loads(file.read_text())
    assert (changed.returncode, verdict["status"]) == (0, "ok"), changed.stderr
    assert verdict["provenance"]["result"] == {"recorded": 7, "synthesised": 3}
    assert verdict["provenance"]["time"] == {"recorded": 7, "estimated": 3, "none": 0}
    assert sum(verdict["provenance"]["estimates"].values()) == verdict["provenance"]["time"]["estimated"]
    assert "not all calls are as recorded" in changed.stderr

    fewer = run_cli(*replay, "--network", "loopback", "--", program, env={"BIAS": ""})
    verdict = json.loads(file.read_text())
    assert (fewer.returncode, verdict["status"]) == (0, "ok"), fewer.stderr
    assert verdict["provenance"]["result"] == {"recorded": 4, "synthesised": 0}


def test_the_program_goes_on_where_the_recording_broke_off(run_cli: RunCli, tmp_path: Path) -> None:
    program, trace, file = tmp_path / "train.py", tmp_path / "trace", tmp_path / "verdict.json"
    program.write_text(
        PROGRAM.replace(
            "    optimizer.step()", "    assert step < int(os.environ.get('FAIL', 9))\n    optimizer.step()"
        )
    )
    recorded = run_cli("record", "--nproc", "2", "--out", trace, "--", program, env={"FAIL": "1"})
    assert recorded.returncode != 0
    done = run_cli(
        "replay", trace, "--rank", "0", "--task", "tune", "--verdict", file, "--", program, env={"FAIL": "9"}
    )
    verdict = json.loads(file.read_text())
    assert (done.returncode, verdict["status"]) == (0, "ok"), done.stderr
    assert verdict["provenance"]["result"] == {"recorded": 4, "synthesised": 3}
    assert verdict["provenance"]["time"] == {"recorded": 4, "estimated": 3, "none": 0}


def test_the_program_goes_on_after_the_recorded_window(run_cli: RunCli, tmp_path: Path) -> None:
    program, trace, file = tmp_path / "train.py", tmp_path / "trace", tmp_path / "verdict.json"
    program.write_text(PROGRAM)
    assert run_cli("record", "--nproc", "2", "--out", trace, "--steps", "0:1", "--", program).returncode == 0
    done = run_cli("replay", trace, "--rank", "0", "--task", "tune", "--verdict", file, "--", program)
    verdict = json.loads(file.read_text())
    assert (done.returncode, len(verdict["steps"])) == (0, 3), done.stderr
    # the barrier's result is that it ends
    assert verdict["provenance"]["result"] == {"recorded": 3, "synthesised": 4}
    assert verdict["provenance"]["time"] == {"recorded": 7, "estimated": 0, "none": 0}
