"""A marked test as all ranks of its job: forked here, recorded, and kept only if all of them pass."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
from enum import StrEnum
from pathlib import Path
from typing import NoReturn

import msgspec
import pytest

from ranklens_core.cluster import ClusterResult, run_local
from ranklens_core.errors import RankLensError, TraceError
from ranklens_core.pytest_plugin.failing import fail, traceback_text
from ranklens_core.pytest_plugin.fixtures import run_body
from ranklens_core.pytest_plugin.marking import (
    Marking,
    shown,
    test_name,
    trace_path,
)
from ranklens_core.record_session import describe_run
from ranklens_core.schema import RunRecord
from ranklens_core.session import record
from ranklens_core.standin import cpu_cuda_context
from ranklens_core.trace import check_replaceable, open_trace, replace_trace

_RECORDED = pytest.StashKey[dict[Path, str]]()

PREIMPORT = ("torch", "torch.distributed", "torch._dynamo", "ranklens_core.session")
"""What every rank would import for itself."""


class _Ending(StrEnum):
    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"
    XFAILED = "xfailed"


class _Outcome(msgspec.Struct, frozen=True):
    """How the test ended in one rank; ``text`` is its traceback as pytest shows it, or a reason."""

    ending: _Ending
    text: str = ""


def record_test(item: pytest.Function, marking: Marking) -> None:
    """Run the test in all ranks and record it; the trace that is there is replaced if all of them pass."""
    path = trace_path(item, marking)
    if _is_recorded(path, item, marking):
        return  # this run's ranks were all ranks: those that are replayed too
    try:
        check_replaceable(path)
        world_size = _world_size(path, item, marking)
        path.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    except (RankLensError, OSError) as error:
        fail(f"The trace {shown(path, item)} cannot be recorded: {error}")
    try:
        _run_ranks(item, marking, world_size, work)
        _check_complete(work / "trace")
        replace_trace(work / "trace", path)
    except RankLensError as error:
        fail(f"The trace {shown(path, item)} was not recorded: {error}")
    finally:
        shutil.rmtree(work, ignore_errors=True)
    item.config.stash[_RECORDED][path] = test_name(item, marking)


def _is_recorded(path: Path, item: pytest.Function, marking: Marking) -> bool:
    """Whether this run of pytest has recorded the trace already; fails if that was for another test."""
    recorded = item.config.stash.setdefault(_RECORDED, {})
    name = test_name(item, marking)
    if path not in recorded:
        return False
    if recorded[path] != name:
        fail(
            f"{shown(path, item)} has just been recorded by {recorded[path]}: give each test a trace of its "
            "own (without a path in the marker each test has one, parametrised ones too)."
        )
    return True


def _world_size(path: Path, item: pytest.Function, marking: Marking) -> int:
    if "RANK" in os.environ:
        fail(
            "--ranklens-record starts ranks of its own, but RANK is set: this is a rank already. Start "
            "pytest without torchrun and the like."
        )
    if marking.world_size is not None:
        return marking.world_size
    try:
        with open_trace(path) as trace:
            world_size = trace.world_size
    except TraceError:
        fail(
            f"How many ranks shall be recorded? There is no trace at {shown(path, item)} to say it: give the "
            "marker world_size=N."
        )
    if max(marking.ranks) >= world_size:
        fail(
            f"The marker asks for rank {max(marking.ranks)}, but {shown(path, item)} has the ranks 0 "
            f"to {world_size - 1}. To record more, give the marker world_size=N."
        )
    return world_size


def _run_ranks(item: pytest.Function, marking: Marking, world_size: int, work: Path) -> None:
    """Run and record all ranks; fails (or skips) as the test did in them."""
    directory = work / "trace"
    run = msgspec.structs.replace(
        describe_run(None, world_size, cpu_cuda=marking.cpu), program=f"pytest {test_name(item, marking)}"
    )

    def rank_main(rank: int) -> int:
        sys.excepthook = lambda *_: None  # pytest's traceback is shown
        _record_rank(item, marking, run, directory, work / f"outcome-{rank}.json")
        return 0

    with cpu_cuda_context(marking.cpu):
        result = run_local(world_size, rank_main, preimport=PREIMPORT, on_output=_pass_on)
    if result.interrupted_by == signal.SIGINT:
        raise KeyboardInterrupt
    if result.interrupted_by is not None:
        pytest.exit(f"the ranks were ended by signal {result.interrupted_by}", 128 + result.interrupted_by)
    outcomes = {
        rank: msgspec.json.decode(file.read_bytes(), type=_Outcome)
        for rank in range(world_size)
        if (file := work / f"outcome-{rank}.json").exists()
    }
    _judge(outcomes, result, world_size, item, marking)


def _record_rank(
    item: pytest.Function, marking: Marking, run: RunRecord, directory: Path, outcome_file: Path
) -> None:
    """One rank, in its own process."""

    def note(ending: _Ending, text: str = "") -> None:
        outcome_file.write_bytes(msgspec.json.encode(_Outcome(ending, text)))

    with record(directory, payload=marking.payload, run=run, every_input=True):
        try:
            run_body(item)
        except pytest.skip.Exception as skipped:
            note(_Ending.SKIPPED, str(skipped))
        except pytest.xfail.Exception as failed:
            note(_Ending.XFAILED, str(failed))
            raise
        except BaseException as error:
            note(_Ending.FAILED, traceback_text(item, error))
            raise
        else:
            note(_Ending.PASSED)


def _judge(
    outcomes: dict[int, _Outcome],
    result: ClusterResult,
    world_size: int,
    item: pytest.Function,
    marking: Marking,
) -> None:
    first = result.first_failure
    bad = [rank for rank, outcome in outcomes.items() if outcome.ending in (_Ending.FAILED, _Ending.XFAILED)]
    bad += [rank for rank in range(world_size) if rank not in outcomes]
    skipped = [rank for rank, outcome in outcomes.items() if outcome.ending is _Ending.SKIPPED]
    if first is not None or bad:
        rank = first.rank if first is not None else bad[0]
        outcome = outcomes.get(rank)
        if outcome is not None and outcome.ending is _Ending.XFAILED:
            pytest.xfail(outcome.text)
        how = first.describe() if first is not None else "it ended without a word"
        text = outcome.text if outcome is not None else how
        _fail(text or how, rank, world_size, item, marking)
    if len(skipped) == world_size:
        pytest.skip(outcomes[0].text)
    if skipped:
        text = f"It skipped the test ({outcomes[skipped[0]].text}), and not all ranks did."
        _fail(text, skipped[0], world_size, item, marking)


def _fail(text: str, rank: int, world_size: int, item: pytest.Function, marking: Marking) -> NoReturn:
    path = trace_path(item, marking)
    kept = "is as it was" if path.exists() else "was not made"
    fail(f"rank {rank} of {world_size} failed first, and the trace {shown(path, item)} {kept}.\n\n{text}")


def _check_complete(directory: Path) -> None:
    """All ranks are in the trace to their end, or ``TraceError``."""
    with open_trace(directory) as trace:
        if trace.missing:
            raise TraceError("; ".join(problem.text for problem in trace.missing))


def _pass_on(rank: int, name: str, lines: bytes) -> None:
    """A rank's output as this process's own, for pytest to capture."""
    stream = sys.stdout if name == "stdout" else sys.stderr
    for line in lines.decode(errors="replace").splitlines(keepends=True):
        stream.write(f"[rank {rank}] {line}")
    stream.flush()
