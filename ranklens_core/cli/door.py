"""Running a program as a front door's settings say: by the functions that the verbs use."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import click

from ranklens_core.errors import RankLensError
from ranklens_core.program import Program
from ranklens_core.settings import Mode, Settings, Spelling, check_world
from ranklens_core.text import printable

LOCAL_RANK = "--local_rank"
"""What DeepSpeed's launcher puts before all other arguments of what it starts."""


def run_door(main: Callable[[], int]) -> NoReturn:
    """Run a front door's ``main`` and leave with its status; a ``RankLensError`` becomes one message."""
    from ranklens_core.cli import prepare_process

    prepare_process()
    try:
        status = main()
    except RankLensError as error:
        click.echo(f"ranklens: {printable(str(error))}", err=True)
        status = error.exit_status
    sys.exit(status)


def run_as_set(settings: Settings, program: Program, spelling: Spelling, *, cpu: bool = False) -> int:
    """Run ``program`` in the mode of ``settings``; returns the exit status.

    Everything that can be wrong with the settings is found before the program starts.

    Raises:
        UsageError: a setting is missing, or contradicts the trace or this job.
        TraceError: the trace is not there or cannot be used.
    """
    mode = settings.acting_mode
    if mode is Mode.RECORD:
        return _record(settings, program, spelling, cpu=cpu)
    if mode is Mode.REPLAY:
        return _replay(settings, program, spelling, cpu=cpu)
    if mode is Mode.EMULATE:
        return _emulate(settings, program, spelling, cpu=cpu)
    program.run()
    return 0


def move_local_rank(arguments: list[str]) -> list[str]:
    """``--local_rank=N PROGRAM ARGS`` as ``PROGRAM --local_rank=N ARGS``: it is meant for the program."""
    if not arguments or not arguments[0].startswith(f"{LOCAL_RANK}="):
        return arguments
    local_rank, *rest = arguments
    after = 2 if rest[:1] == ["-m"] else 1
    return [*rest[:after], local_rank, *rest[after:]]


def _record(settings: Settings, program: Program, spelling: Spelling, *, cpu: bool) -> int:
    from ranklens_core.cli.record import record_this_rank
    from ranklens_core.hash_seed import fix_hash_seed
    from ranklens_core.place import RankEnvironment

    place = RankEnvironment.from_environ(os.environ)
    check_world(settings, place.world_size, "this job (WORLD_SIZE)", spelling)
    if settings.payload is None:
        raise spelling.error(
            "payload",
            "is missing: whose results shall be kept? Say all, none or ranks like 0,5 (all of a large job "
            "can be many gigabytes).",
        )
    outside = [
        part
        for part in settings.payload.split(",")
        if settings.payload not in ("all", "none") and int(part) >= place.world_size
    ]
    if outside:
        raise spelling.error(
            "payload", f"names rank {outside[0]}, but this job has the ranks 0 to {place.world_size - 1}."
        )
    fix_hash_seed()
    return record_this_rank(
        program,
        Path(settings.trace),
        settings.payload,
        settings.window,
        window_only=settings.window_only,
        cpu=cpu,
        overwrite=settings.overwrite,
    )


def _replay(settings: Settings, program: Program, spelling: Spelling, *, cpu: bool) -> int:
    from ranklens_core.cli.replay import replay_program, take_hash_seed
    from ranklens_core.trace import open_trace

    if settings.rank is None:
        raise spelling.error("rank", "is missing: which rank of the trace shall be replayed?")
    directory = Path(settings.trace)
    with open_trace(directory) as trace:
        check_world(settings, trace.world_size, f"the trace {settings.trace}", spelling)
    take_hash_seed(directory, settings.rank)
    return replay_program(
        program,
        directory,
        settings.rank,
        settings.task,
        from_step=settings.from_step,
        cpu=cpu,
        verdict_file=Path(settings.verdict) if settings.verdict else None,
    )


def _emulate(settings: Settings, program: Program, spelling: Spelling, *, cpu: bool) -> int:
    from ranklens_core.cli.emulate import emulate_program

    for name in ("rank", "world_size"):
        if getattr(settings, name) is None:
            raise spelling.error(name, "is missing: emulating needs the rank and how many there are.")
    assert settings.world_size is not None
    check_world(settings, settings.world_size, "the emulated job", spelling)
    assert settings.rank is not None
    return emulate_program(
        program,
        settings.world_size,
        settings.rank,
        settings.task,
        network=settings.network,
        cpu=cpu,
        verdict_file=Path(settings.verdict) if settings.verdict else None,
    )
