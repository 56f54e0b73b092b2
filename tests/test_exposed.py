"""Exposed communication of recorded steps, by hand, and of replayed ones against a survivor's own pace."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from conftest import RunCli
from timing_samples import LogBuilder, joined_of

from ranklens_core.schema import Step
from ranklens_core.timing.arrival import plan_arrivals
from ranklens_core.timing.exposed import Exposed, ExposedMeter, recorded_exposed

PAIR = {"0,1": (0, 1)}
PACING = Path(__file__).parent / "programs" / "pacing.py"


def exposed_of(own: LogBuilder, peer: LogBuilder, *ends_ns: int) -> dict[int, Exposed]:
    joined, binding = joined_of(own, peer)
    begins = (0, *ends_ns)
    steps = [Step(index=n, begin_ns=begins[n], end_ns=end) for n, end in enumerate(ends_ns)]
    return dict(recorded_exposed(own.build(), plan_arrivals(joined, binding, 0), steps))


def test_blocking_calls_hold_the_program() -> None:
    own, peer = LogBuilder(0, PAIR), LogBuilder(1, PAIR)
    # the peer comes 20 later, transfer 5; then 10 later, transfer 10; then before, transfer 4
    for rank, calls in ((own, ((10, 35), (50, 70), (90, 94))), (peer, ((30, 35), (60, 70), (80, 94)))):
        for start, end in calls:
            rank.call("all_reduce", "0,1", start, end, blocks=True)
    assert exposed_of(own, peer, 80, 100) == {0: Exposed(30, 15), 1: Exposed(0, 4)}


def test_of_an_asynchronous_call_only_the_wait_counts() -> None:
    own, peer = LogBuilder(0, PAIR), LogBuilder(1, PAIR)
    # peer at 30, end at 35; waited for from 20 to 36
    first = own.call("all_reduce", "0,1", 10, 35, blocks=False)
    own.wait(first, 20, 36)
    peer.call("all_reduce", "0,1", 30, 35, blocks=True)
    # over at 55, waited for at 60
    second = own.call("all_reduce", "0,1", 40, 55, blocks=False)
    own.wait(second, 60, 61)
    peer.call("all_reduce", "0,1", 50, 55, blocks=True)
    assert exposed_of(own, peer, 100) == {0: Exposed(10, 6)}


def test_a_call_that_never_ended_is_left_out() -> None:
    own, peer = LogBuilder(0, PAIR), LogBuilder(1, PAIR)
    own.call("all_reduce", "0,1", 10, 15, blocks=True)
    peer.call("all_reduce", "0,1", 10, 15, blocks=True)
    own.call("all_reduce", "0,1", 20, None, blocks=True)
    assert exposed_of(own, peer, 100) == {0: Exposed(0, 5)}


def test_the_meter_tells_estimated_time() -> None:
    meter = ExposedMeter()
    meter.add(10, 30, 35, estimated=False)
    meter.add(40, 20, 44, estimated=True)
    # the peers were to come after the program went on: all of it was waiting
    meter.add(50, 90, 60, estimated=True)
    assert meter.take() == Exposed(30, 9, 14)
    assert meter.take() == Exposed()


@pytest.mark.parametrize(
    ("rank", "own_ms", "wait_ms", "step_ms"),
    [
        (0, 40, 0, 0),  # as recorded: waits 25 a step for rank 1
        (0, 60, -20, 0),  # slower: the late peer's lateness is used up, the step takes as long
        (0, 20, +20, 0),  # faster: waits more
        (0, 95, -25, +30),  # slower than the peer: nothing to wait for, the peer waits instead
        (1, 85, 0, +20),  # the late rank later still
        (1, 45, 0, -20),  # the late rank on time: rank 0 waits less
    ],
)
def test_a_survivor_at_another_pace(
    run_cli: RunCli,
    tmp_path_factory: pytest.TempPathFactory,
    tmp_path: Path,
    rank: int,
    own_ms: int,
    wait_ms: int,
    step_ms: int,
) -> None:
    """Differences to the recorded median step; 8 ms of tolerance for a machine that has other work."""
    trace = tmp_path_factory.getbasetemp() / "pacing-trace"
    if not trace.exists():
        recorded = run_cli("record", "--nproc", "2", "--out", trace, "--", PACING)
        assert recorded.returncode == 0, recorded.stderr
    replayed = run_cli(
        *("replay", trace, "--rank", str(rank), "--task", "profile", "--verdict", "v.json", "--", PACING),
        env={"OWN_MS": str(own_ms)},
    )
    assert replayed.returncode == 0, replayed.stderr
    timing = json.loads((tmp_path / "v.json").read_text())["timing"]
    waited = (timing["wait"]["replayed_ns"] - timing["wait"]["recorded_ns"]) / 1e6
    took = (timing["step"]["replayed_ns"] - timing["step"]["recorded_ns"]) / 1e6
    assert waited == pytest.approx(wait_ms, abs=8)
    assert took == pytest.approx(step_ms, abs=8)
    assert "ms, median of each (recorded): step" in replayed.stderr
