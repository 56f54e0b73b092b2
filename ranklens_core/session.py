"""The public Python API for recording and replaying from inside a program."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ranklens_core.own_cores import CorePlan
from ranklens_core.place import RankEnvironment, run_id_of
from ranklens_core.program import Program
from ranklens_core.record_session import RecordSession, describe_run, keeps_values
from ranklens_core.replay_session import ReplaySession
from ranklens_core.schema import RunRecord
from ranklens_core.task import OnMismatch, task_named
from ranklens_core.trace import open_trace


@contextmanager
def record(
    directory: str | os.PathLike[str],
    *,
    payload: str | bool = "all",
    steps: tuple[int, int | None] | None = None,
    program: Program | None = None,
    run: RunRecord | None = None,
    overwrite: bool = False,
    every_input: bool = False,
    cores: CorePlan | None = None,
) -> Iterator[RecordSession]:
    """Record the calls made inside the block, on this rank, into ``directory``.

    ``payload`` is ``"all"``, ``"none"`` or ``"R,R,..."``: the ranks whose values are kept. ``steps``
    is the window ``(first, end)`` whose inputs can be compared later, ``every_input`` keeps those of calls
    without floating-point numbers too. ``cores`` says where this rank's threads are to run.
    """
    place = RankEnvironment.from_environ(os.environ)
    session = RecordSession(
        Path(directory),
        run or describe_run(program, place.world_size, cpu_cuda=False, run_id=run_id_of(os.environ)),
        place,
        keep_values=keeps_values(payload, place.rank),
        window=steps,
        overwrite=overwrite,
        every_input=every_input,
        cores=cores,
    )
    status, interrupted = 1, False
    error: BaseException | None = None
    try:
        yield session
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        raise
    except KeyboardInterrupt as caught:
        interrupted, error = True, caught  # as are the other ranks
        raise
    except BaseException as caught:
        error = caught
        raise
    finally:
        session.close(status, error)
        error = None  # its frames hold the program's process groups
        if status and not interrupted:
            session.linger()


@contextmanager
def replay(
    directory: str | os.PathLike[str],
    rank: int,
    task: str = "debug",
    *,
    on_mismatch: OnMismatch | None = None,
) -> Iterator[ReplaySession]:
    """Run the block as ``rank`` of the recorded job; ``session.verdict`` is there afterwards.

    Raises ``UsageError`` for a rank outside the world and ``TraceError`` for an unusable trace
    before the block runs; in it, what ``Replayer`` raises.
    """
    session = ReplaySession(open_trace(directory), rank, task_named(task), on_mismatch=on_mismatch)
    error: BaseException | None = None
    try:
        yield session
    except BaseException as caught:
        error = caught
        raise
    finally:
        session.close(error)
