"""The public Python API for recording and replaying from inside a program."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ranklens_core.emulate_session import EmulateSession
from ranklens_core.own_cores import CorePlan
from ranklens_core.place import RankEnvironment, run_id_of
from ranklens_core.program import Program
from ranklens_core.record_session import RecordSession, describe_run, keeps_values
from ranklens_core.replay_session import ReplaySession
from ranklens_core.schema import RunRecord
from ranklens_core.standin import cpu_cuda_context
from ranklens_core.task import OnMismatch, on_mismatch_named, task_named
from ranklens_core.timing.network import network_named
from ranklens_core.trace import open_trace


@contextmanager
def record(
    directory: str | os.PathLike[str],
    *,
    payload: str | bool = "all",
    steps: tuple[int, int | None] | None = None,
    window_only: bool = False,
    program: Program | None = None,
    run: RunRecord | None = None,
    overwrite: bool = False,
    every_input: bool = False,
    cores: CorePlan | None = None,
) -> Iterator[RecordSession]:
    """Record the calls made inside the block, on this rank, into ``directory``.

    ``payload`` is ``"all"``, ``"none"`` or ``"R,R,..."``: the ranks whose values are kept. ``steps``
    is the window ``(first, end)`` whose inputs can be compared later; with ``window_only`` the results of the
    steps before it are not kept, and a replay starts from the program's own checkpoint (``from_step``).
    ``every_input`` keeps the inputs of calls
    without floating-point numbers too. ``cores`` says where this rank's threads are to run.
    """
    place = RankEnvironment.from_environ(os.environ)
    session = RecordSession(
        Path(directory),
        run or describe_run(program, place.world_size, cpu_cuda=False, run_id=run_id_of(os.environ)),
        place,
        keep_values=keeps_values(payload, place.rank),
        window=steps,
        window_only=window_only,
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
    on_mismatch: OnMismatch | str | None = None,
    from_step: int | None = None,
    network: str | None = None,
    bandwidth: float = 1.0,
) -> Iterator[ReplaySession]:
    """Run the block as ``rank`` of the recorded job, alone; ``session.verdict`` is there afterwards.

    ``task`` is one of ``ranklens replay --task``; ``on_mismatch`` (``"stop"``, ``"estimate"``,
    ``"report"``) is the task's own by default. ``network``, its bandwidth times ``bandwidth``, estimates the
    time of what was not recorded. ``from_step`` is the step that the block starts with, from a checkpoint of
    its own. The CPU stand-in for CUDA is put in if the recording had it. Afterwards the
    process is as it was.

    Raises:
        UsageError: a rank outside the world, no such task or network, torch.distributed initialised already.
        TraceError: an unusable trace; ``ValuesMissingError`` if the task needs values the rank has not.
        StructureMismatchError: in the block, at the first call that is not as recorded, where the task stops.
        UnsupportedError: in the block, at communication that nobody can stand in for.
    """
    chosen = on_mismatch_named(on_mismatch) if on_mismatch is not None else None
    described = network_named(network, bandwidth)
    with open_trace(directory) as trace, cpu_cuda_context(trace.run.cpu_cuda):
        session = ReplaySession(
            trace, rank, task_named(task), on_mismatch=chosen, from_step=from_step, network=described
        )
        with _ended(session):
            yield session


@contextmanager
def emulate(
    *,
    world_size: int,
    rank: int,
    task: str = "profile",
    network: str | None = None,
    bandwidth: float = 1.0,
) -> Iterator[EmulateSession]:
    """Run the block as ``rank`` of a job of ``world_size`` that was never recorded.

    Results of communication are made up: finite, the same in every run, counted as ``synthesised`` in
    ``session.verdict``, which is there afterwards. Their times are estimated from ``network`` (a name, or a
    YAML file), its bandwidth times ``bandwidth``; without one no time is kept.

    Raises:
        UsageError: a rank outside the world, no such task or network, or a task that needs a recording.
        UnsupportedError: in the block, at a result that another rank alone knows.
    """
    described = network_named(network, bandwidth)
    session = EmulateSession(rank, world_size, task_named(task), described)
    with _ended(session):
        yield session


@contextmanager
def _ended(session: ReplaySession | EmulateSession) -> Iterator[None]:
    """Close the session with what the block ends with."""
    error: BaseException | None = None
    try:
        yield
    except BaseException as caught:
        error = caught
        raise
    finally:
        session.close(error)
