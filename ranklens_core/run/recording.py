"""Seeing to it that a target's trace is there, once, and is the trace of this very job."""

from __future__ import annotations

import fcntl
import os
import shlex
import subprocess
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from ranklens_core.errors import TraceError, TraceIncompleteError, TraceNotFoundError, UsageError
from ranklens_core.program import Program
from ranklens_core.run.commands import Command, program_of, record_command
from ranklens_core.run.config import RunConfig
from ranklens_core.trace import Trace, open_trace, read_ending

Say = Callable[[str], None]

LAST_LINES = 20
"""Of a recording that failed, so many lines are shown."""

REMEDY = "record=again replaces it, trace=DIR keeps both"


class RecordingFailedError(TraceError):
    """The job failed while it was recorded. ``exit_status`` is the job's own."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.exit_status = status  # type: ignore[misc]  # the program's status passes through


def is_there(config: RunConfig) -> bool:
    """Whether the job's trace exists and is the one that ``config`` would record.

    Raises:
        TraceNotFoundError: there is none, and ``record.when`` is ``never``.
        TraceIncompleteError: its recording did not come to a good end.
        UsageError: it is another program's, or was recorded otherwise; the difference is named.
    """
    directory, when = Path(config.trace), config.record.when
    exists = directory.is_dir() and any(directory.iterdir())
    if when == "again" and exists:
        return False
    if not exists:
        if when == "never":
            raise TraceNotFoundError(
                f"there is no trace at {config.trace}, and record=never does not record one. Use "
                "record=once, or name the trace: trace=DIR."
            )
        return False
    with open_trace(directory) as trace:
        differences = list(_differences(config, program_of(config.workload), trace))
        if differences:
            raise UsageError(
                f"the trace {config.trace} is of another job: {'; '.join(differences)}. {REMEDY}."
            )
        if when == "once":
            _check_ending(config, trace)
    return True


def ensure(config: RunConfig, say: Say) -> None:
    """Record the trace if it is not there; whoever comes meanwhile waits for it. Errors as ``is_there``.

    Raises:
        RecordingFailedError: the job failed.
    """
    with _lock(Path(config.trace)):
        if not is_there(config):
            _record(config, say)


def _record(config: RunConfig, say: Say) -> None:
    command = record_command(
        config,
        program_of(config.workload),
        overwrite=config.record.when == "again" and Path(config.trace).exists(),
    )
    log = _beside(Path(config.trace), ".log")
    say(f"$ {command.typed()}")
    status, last = _run(command, log, say)
    if status:
        raise RecordingFailedError(
            f"the job failed with status {status} while it was recorded. It ended with\n\n{last}\n\nAll it "
            f"said is in {log}. `ranklens diagnose {shlex.quote(config.trace)}` says which rank began it; "
            "record=never replays what was recorded.",
            status,
        )


def _run(command: Command, log: Path, say: Say) -> tuple[int, str]:
    """Run it with all output in ``log``; show RankLens' own lines. The status, and the last lines."""
    last: deque[str] = deque(maxlen=LAST_LINES)
    environ = {"PYTHONUNBUFFERED": "1", **command.environ()}
    with (
        open(log, "w", encoding="utf-8") as file,
        subprocess.Popen(
            command.argv(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=environ,
        ) as process,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            file.write(line)
            last.append(line)
            if line.startswith("ranklens: "):
                say(f"  {line.rstrip()}")
        status = process.wait()
    return (status if status >= 0 else 128 - status), "".join(last).rstrip()


def _differences(config: RunConfig, program: Program, trace: Trace) -> Iterator[str]:
    run, record = trace.run, config.record
    if run.world_size != config.target.world_size:
        yield f"it has {run.world_size} ranks, target {config.target.name} has {config.target.world_size}"
    recorded, asked = _main(run.program, run.arguments), _main(program.describe(), program.args)
    if recorded != asked:
        yield f"it is of `{recorded}`, not of `{asked}`"
    elif run.arguments != program.args:
        yield f"its program had the arguments `{shlex.join(run.arguments)}`, not `{shlex.join(program.args)}`"
    if (run.clock, run.network or None) != (record.clock, record.network):
        recorded, asked = (
            f"{clock} clock{f' ({network})' if network else ''}"
            for clock, network in ((run.clock, run.network), (record.clock, record.network))
        )
        yield f"it was recorded with the {recorded}, not the {asked}"
    yield from _other_variables(config.workload.environment, trace)


def _other_variables(environment: Mapping[str, object], trace: Trace) -> Iterator[str]:
    """Variables of the workload that the recorded program read with another value."""
    first = next(iter(trace.ranks.values()), None)
    items = first.environment if first is not None and environment else ()
    recorded = {item.name: item.value for item in items if item.kind == "variable"}
    recorded |= {item.name: "unset" for item in items if item.kind == "unset"}
    for name, value in environment.items():
        if value is not None and recorded.get(name, str(value)) != str(value):
            yield f"{name} was {recorded[name]}, not {value}"


def _main(described: str, arguments: tuple[str, ...]) -> str:
    """The program of a command line, without its arguments."""
    words = shlex.split(described)
    words = words[: len(words) - len(arguments)]
    return shlex.join(words if words[:1] == ["-m"] else [os.path.normpath(word) for word in words])


def _check_ending(config: RunConfig, trace: Trace) -> None:
    ending = read_ending(trace.files)
    complete = [rank for rank, record in trace.ranks.items() if record.complete]
    if ending is not None and (ending.status or ending.interrupted_by):
        what = f"ended with status {ending.status}" if ending.status else "was interrupted"
        if ending.first_failure is not None:
            what += f" (rank {ending.first_failure} failed first)"
    elif len(complete) < trace.world_size:
        what = f"is not complete: {len(complete)} of {trace.world_size} ranks came to their end"
    else:
        return
    raise TraceIncompleteError(
        f"the recording in {config.trace} {what}. record=again records anew, record=never replays it."
    )


def _beside(trace: Path, suffix: str) -> Path:
    """A file of ours next to the trace: in it only the trace's own files may lie."""
    absolute = trace.absolute()
    absolute.parent.mkdir(parents=True, exist_ok=True)
    return absolute.with_name(f"{absolute.name}{suffix}")


@contextmanager
def _lock(trace: Path) -> Iterator[None]:
    """Nobody else records or checks ``trace``; the lock is free when its holder ends, however it ends."""
    try:
        file = open(_beside(trace, ".lock"), "a")  # noqa: SIM115 closed below
    except OSError as error:
        raise UsageError(
            f"trace is {str(trace)!r}, which cannot be written: {error.strerror or error}."
        ) from error
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
