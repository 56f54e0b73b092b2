"""What torch.profiler shows of a replay: each call, waiting told from transfer; the compute as it was."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import CliResult, RunCli

from ranklens_core.spans import is_profiling

PROFILED = Path(__file__).parent / "programs" / "profiled.py"

Events = list[dict[str, Any]]


def events_of(path: Path) -> Events:
    found = [event for event in json.loads(path.read_text())["traceEvents"] if event.get("ph") == "X"]
    return sorted(found, key=lambda event: event["ts"])


def named(events: Events, begin: str) -> Events:
    return [event for event in events if event["name"].startswith(begin)]


def inside(inner: dict[str, Any], outer: dict[str, Any]) -> bool:
    return bool(
        inner["tid"] == outer["tid"]
        and outer["ts"] <= inner["ts"]
        and inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"]
    )


@pytest.fixture
def profiles(run_cli: RunCli, tmp_path: Path) -> Callable[[str], tuple[Events, Events]]:
    """Rank 1's profile while recorded and while replayed with a task."""

    def run(task: str) -> tuple[Events, Events]:
        def done(result: CliResult) -> None:
            assert result.returncode == 0, result.stderr

        recorded, replayed = tmp_path / "recorded", tmp_path / "replayed"
        done(run_cli("record", "--nproc", "2", "--out", "t", "--", PROFILED, env={"TRACE": str(recorded)}))
        place = ("replay", "t", "--rank", "1", "--task", task, "--", PROFILED)
        done(run_cli(*place, env={"TRACE": str(replayed)}))
        return events_of(tmp_path / "recorded-1.json"), events_of(tmp_path / "replayed-1.json")

    return run


def test_each_call_is_a_span_with_waiting_apart(
    profiles: Callable[[str], tuple[Events, Events]],
) -> None:
    recorded, replayed = profiles("profile")
    calls = named(replayed, "gloo:")
    assert [call["name"] for call in calls] == ["gloo:all_reduce", "gloo:all_reduce", "gloo:recv"]
    # torch's own names for them, on this backend
    assert {call["name"] for call in calls} == {call["name"] for call in named(recorded, "gloo:")}
    assert all(call["cat"] == "user_annotation" for call in calls)
    asynchronous, blocking, message = (call["args"] for call in calls)
    assert asynchronous["Collective name"] == "allreduce"
    assert asynchronous["Process Group Description"] == "pair"
    assert (asynchronous["group"], blocking["group"]) == ("0,1#1", "0,1")
    assert (asynchronous["Seq"], blocking["Seq"], message["Seq"]) == (2, 2, 2)
    assert asynchronous["in_msg_bytes"] == asynchronous["out_msg_bytes"] == 64 * 64 * 4
    assert (asynchronous["In msg nelems"], asynchronous["dtype"]) == (64 * 64, "Float")
    assert asynchronous["Process Group Ranks"] == "[0, 1]"
    assert message["Src Rank"] == 0
    assert {call["args"]["time"] for call in calls} == {"recorded"}
    for call in calls:
        parts = [part for part in named(replayed, "ranklens::") if inside(part, call)]
        names = [part["name"].split()[0] for part in parts]
        assert names in (["ranklens::transfer"], ["ranklens::wait_peers", "ranklens::transfer"])
        assert all(part["args"]["Seq"] == call["args"]["Seq"] for part in parts)
    operators = named(replayed, "c10d::")
    assert any(inside(calls[1], operator) for operator in operators), "a blocking call lies in its operator"


def test_plain_compute_is_as_it_was(profiles: Callable[[str], tuple[Events, Events]]) -> None:
    recorded, replayed = profiles("profile")
    counts = [Counter(event["name"] for event in named(events, "aten::")) for events in (recorded, replayed)]
    assert counts[0] == counts[1]
    assert counts[0]["aten::addmm"] == 1


def test_a_task_without_time_shows_no_spans(
    profiles: Callable[[str], tuple[Events, Events]],
) -> None:
    _, replayed = profiles("debug")
    assert named(replayed, "c10d::")
    assert not named(replayed, "ranklens::")


def test_no_profiler_is_active_here() -> None:
    assert is_profiling() is False
