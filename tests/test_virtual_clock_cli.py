"""One small job on the command line: recorded with a virtual clock, shown, replayed against it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from conftest import RunCli

TINY = Path(__file__).parent / "programs" / "tiny.py"
RECORD = ("record", "--nproc", "4", "--clock", "virtual", "--network", "loopback", "--out", "trace")


def test_a_job_of_four_ranks_keeps_virtual_time(run_cli: RunCli, tmp_path: Path) -> None:
    own = ("--own-core", "3") if len(os.sched_getaffinity(0)) > 1 else ()
    recorded = run_cli(*RECORD, *own, "--payload", "3", "--", TINY)
    assert recorded.returncode == 0, recorded.stderr

    info = json.loads(run_cli("info", "trace", "--json").stdout)
    assert (info["clock"], info["network"]) == ("virtual", "loopback")
    virtual = info["virtual"]
    assert virtual["own_cores"] == ([3] if own else [])
    assert set(virtual["transfers"]) == {"alpha-beta, loopback"}
    steps = virtual["step_ns"]["3"]
    assert len(steps) == 4
    # a step has at least its calls: two layers, four gradients, at 6 steps of 83 us for an all-reduce
    assert min(steps) > 4 * 6 * 83_000
    assert "estimated transfers on recorded compute" in run_cli("info", "trace").stdout

    replayed = run_cli(
        "replay", "trace", "--rank", "3", "--task", "profile", "--verdict", "verdict.json", "--", TINY
    )
    assert replayed.returncode == 0, replayed.stderr
    verdict = json.loads((tmp_path / "verdict.json").read_text())
    assert verdict["provenance"]["clock"] == "virtual"
    assert verdict["provenance"]["time"] == {
        "recorded": 0,
        "estimated": verdict["calls"]["recorded"],
        "none": 0,
    }
    assert [step["recorded_ns"] for step in verdict["steps"]] == steps
    for step in verdict["steps"]:
        # nothing makes a step faster than its transfers
        assert step["wall_ns"] > 4 * 6 * 83_000
    assert "off the virtual on average" in replayed.stderr
    assert "estimated transfers on recorded compute" in replayed.stderr

    slower = run_cli(
        *("replay", "trace", "--rank", "3", "--task", "profile", "--verdict", "verdict.json"),
        *("--network", "loopback", "--bandwidth", "0.001", "--", TINY),
    )
    assert slower.returncode == 0, slower.stderr
    at_a_thousandth = json.loads((tmp_path / "verdict.json").read_text())["steps"]
    # six gradients and activations of 128 bytes or more, at 3.3 MB/s in place of GB/s
    assert all(after["recorded_ns"] > before for after, before in zip(at_a_thousandth, steps, strict=True))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--clock", "virtual"), "needs the network"),
        (("--network", "loopback"), "belongs to --clock virtual"),
        (("--own-core", "1"), "belongs to --clock virtual"),
        (("--clock", "virtual", "--network", "nowhere"), "no network named 'nowhere'"),
        (("--clock", "virtual", "--network", "loopback", "--own-core", "1", "--pin"), "choose one"),
        (("--clock", "virtual", "--network", "loopback", "--own-core", "9"), "not one of the 2 ranks"),
        (("--clock", "virtual", "--network", "loopback", "--own-core", "1,1"), "takes different ranks"),
        (("--bandwidth", "0.5"), "name one"),
    ],
)
def test_options_that_do_not_go_together(
    run_cli: RunCli, tmp_path: Path, options: tuple[str, ...], says: str
) -> None:
    done = run_cli("record", "--nproc", "2", "--out", "trace", *options, "--", TINY)
    assert (done.returncode, says in done.stderr) == (2, True), done.stderr
    assert not (tmp_path / "trace").exists()
