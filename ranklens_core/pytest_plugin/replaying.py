"""A marked test as one rank of its recorded job, in pytest's own process."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from ranklens_core.errors import RankLensError, TraceNotFoundError
from ranklens_core.pytest_plugin.failing import fail, traceback_text
from ranklens_core.pytest_plugin.fixtures import run_body
from ranklens_core.pytest_plugin.marking import (
    Marking,
    rank_of,
    record_command,
    shown,
    test_name,
    trace_path,
)
from ranklens_core.replay_session import ReplaySession
from ranklens_core.standin import cpu_cuda_context
from ranklens_core.task import task_named
from ranklens_core.trace import Trace, open_trace
from ranklens_core.verdict import Status, Verdict

CHECK = dataclasses.replace(task_named("debug"), compares_all=True)
"""Task debug for tests: few of them have training steps, so the inputs of all calls are compared."""


def replay_test(item: pytest.Function, marking: Marking) -> None:
    """Run the test as its rank; fails with the mismatch and the command that records the trace anew."""
    path = trace_path(item, marking)
    try:
        trace = _opened(path, item, marking)
    except TraceNotFoundError:
        fail(f"There is no trace at {shown(path, item)}. Record it: {record_command(item, marking)}")
    except RankLensError as error:
        fail(_again(str(error), item, marking))
    with trace:
        _replay(trace, item, marking)


def _opened(path: Path, item: pytest.Function, marking: Marking) -> Trace:
    """The trace, if it is of the world that the marker asks for."""
    trace = open_trace(path)
    if marking.world_size not in (None, trace.world_size):
        fail(
            _again(
                f"The marker says world_size={marking.world_size}, but {shown(path, item)} was recorded with "
                f"{trace.world_size} ranks.",
                item,
                marking,
            )
        )
    return trace


def _replay(trace: Trace, item: pytest.Function, marking: Marking) -> None:
    error: BaseException | None = None
    excepthook = sys.excepthook
    with cpu_cuda_context(trace.run.cpu_cuda):
        try:
            session = ReplaySession(trace, rank_of(item, marking), CHECK)
        except RankLensError as problem:
            fail(_again(str(problem), item, marking))
        try:
            run_body(item)
        except BaseException as caught:
            error = caught
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
            sys.excepthook = excepthook  # init_process_group puts the rank into it
            verdict = session.close(error)
    _judge(verdict, error, trace, item, marking)


def _judge(
    verdict: Verdict, error: BaseException | None, trace: Trace, item: pytest.Function, marking: Marking
) -> None:
    """Return if the test is good; raise its own error, or that its trace is stale."""
    if isinstance(error, KeyboardInterrupt | pytest.exit.Exception):
        raise error
    parted = verdict.values.first_divergence or verdict.structure.first_mismatch
    if verdict.status is Status.OK and error is None:
        return
    words = verdict.words([record_command(item, marking)])
    if verdict.status is Status.PROGRAM_FAILED and error is not None and parted is None:
        item.add_report_section("call", "ranklens", words)
        raise error
    fail(_explain(verdict, error, trace, item, marking) + "\n\n" + words)


def _explain(
    verdict: Verdict, error: BaseException | None, trace: Trace, item: pytest.Function, marking: Marking
) -> str:
    """Why a test and its trace do not belong together, in a sentence or two."""
    place, this = shown(Path(trace.path), item), f"pytest {test_name(item, marking)}"
    what = {
        Status.STRUCTURE_MISMATCH: "its calls are not the recorded ones",
        Status.TRACE_ENDED: "it goes on where the recording ends",
        Status.UNSUPPORTED: "it does what a replay cannot stand in for",
        Status.USAGE: "it does what a replay does not allow",
    }.get(verdict.status, "it sends other values than were recorded")
    text = f"This test and its trace {place} do not fit: {what}."
    if trace.run.program and trace.run.program != this:
        text += (
            f" The trace was recorded by `{trace.run.program}`, and this is `{this}`: if both use it, give "
            "each a trace of its own."
        )
    if error is not None and not isinstance(error, RankLensError):
        text += " After that it failed, maybe for that reason:\n\n" + traceback_text(item, error)
    return text


def _again(problem: str, item: pytest.Function, marking: Marking) -> str:
    return f"{problem}\nRecord it anew: {record_command(item, marking)}"
