"""docs/verdict.md says what ``--verdict`` writes, field by field; the verdict in words is short."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from ranklens_core import verdict
from ranklens_core.completion.cpu import Lateness
from ranklens_core.schema import Step
from ranklens_core.step_times import StepTimes, untimed_steps
from ranklens_core.timing.exposed import Exposed, ExposedMeter

DOC = (Path(__file__).parents[1] / "docs" / "verdict.md").read_text()

RECORDS = [
    value
    for value in vars(verdict).values()
    if isinstance(value, type) and issubclass(value, msgspec.Struct) and value.__module__ == verdict.__name__
]


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.__name__)
def test_fields_of_each_record(record: type[msgspec.Struct]) -> None:
    assert f"### {record.__name__}\n" in DOC
    section = DOC.split(f"### {record.__name__}\n")[1].split("\n###")[0]
    assert re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE) == list(record.__struct_fields__)


def test_every_section_is_a_record() -> None:
    assert re.findall(r"^### (\w+)$", DOC, re.MULTILINE)[0] == "Verdict"
    assert sorted(re.findall(r"^### (\w+)$", DOC, re.MULTILINE)) == sorted(r.__name__ for r in RECORDS)
    assert all(f"`{status}`" in DOC for status in verdict.Status)


def test_the_version() -> None:
    assert DOC.startswith(f"# The verdict, version {verdict.VERDICT_VERSION}\n")


MS = 1_000_000


def step(index: int, ms: int) -> Step:
    return Step(index=index, begin_ns=100 * index * MS, end_ns=(100 * index + ms) * MS)


@pytest.fixture
def times() -> StepTimes:
    """Three steps: 50, 20 and 22 ms; recorded 40, 20 and 20 ms, of which 4 waiting and 6 transfer."""
    meter = ExposedMeter()
    kept = StepTimes(
        meter,
        {index: Exposed(4 * MS, 6 * MS) for index in range(3)},
        lambda: Lateness(3, 1000, 2000, 3000),
        lambda: 0,
    )
    meter.add(0, 9 * MS, 9 * MS, estimated=False)
    kept.begin()  # forgets what came before the first step
    for index, ms in enumerate((50, 20, 22)):
        meter.add(0, 3 * MS, 9 * MS, estimated=False)
        meter.add(0, 0, 1 * MS, estimated=True)
        kept.end(step(index, ms))
    return kept


def test_steps_and_their_parts(times: StepTimes) -> None:
    done = [step(0, 50), step(1, 20), step(2, 22)]
    recorded = [step(0, 40), step(1, 20), step(2, 20)]
    steps = times.steps(done, recorded)
    assert [one.error_pct for one in steps] == [25.0, 0.0, 10.0]
    assert steps[1].parts == verdict.StepParts(wait_ns=3 * MS, transfer_ns=7 * MS, compute_ns=10 * MS)
    assert steps[1].recorded_parts == verdict.StepParts(
        wait_ns=4 * MS, transfer_ns=6 * MS, compute_ns=10 * MS
    )
    timing = times.timing(steps)
    # the first step warms up
    assert (timing.mean_abs_error_pct, timing.worst_abs_error_pct) == (5.0, 10.0)
    assert timing.step == verdict.Compared(replayed_ns=21 * MS, recorded_ns=20 * MS, error_pct=5.0)
    assert timing.wait == verdict.Compared(replayed_ns=3 * MS, recorded_ns=4 * MS, error_pct=-25.0)
    assert timing.compute == verdict.Compared(replayed_ns=11 * MS, recorded_ns=10 * MS, error_pct=10.0)
    assert timing.estimated_pct == 10.0


def test_without_a_record_there_is_no_error(times: StepTimes) -> None:
    timing = times.timing(times.steps([step(0, 50), step(1, 20)], []))
    assert timing.mean_abs_error_pct is None
    assert timing.step == verdict.Compared(replayed_ns=20 * MS, recorded_ns=None, error_pct=None)


def test_no_step_at_all(times: StepTimes) -> None:
    timing = times.timing(())
    assert (timing.step, timing.mean_abs_error_pct, timing.estimated_pct) == (None, None, 0.0)


def test_where_no_time_was_kept_there_is_no_error() -> None:
    steps = untimed_steps([step(0, 50), step(1, 20)], [step(0, 40)])
    assert [(one.recorded_ns, one.error_pct, one.parts) for one in steps] == [
        (40 * MS, None, None),
        (None, None, None),
    ]
