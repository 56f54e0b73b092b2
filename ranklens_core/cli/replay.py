"""``ranklens replay``: one rank of a recorded job, alone."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import click

from ranklens_core.cli.options import (
    cpu_option,
    program_argument,
    trace_argument,
    verdict_option,
)
from ranklens_core.errors import UsageError

if TYPE_CHECKING:
    from ranklens_core.program import Program
    from ranklens_core.verdict import Verdict


@click.command()
@trace_argument
@click.option("--rank", type=int, required=True, metavar="R", help="The rank to run.")
@click.option(
    "--task",
    default="debug",
    show_default=True,
    metavar="debug|profile|structure",
    help="What the replay is for.",
)
@click.option(
    "--on-mismatch",
    type=click.Choice(["stop", "estimate", "report"]),
    help="What to do with a call that is not the recorded one (default: the task's).",
)
@click.option("--pdb", is_flag=True, help="Stop in pdb where an error is raised.")
@cpu_option
@verdict_option
@program_argument
def command(
    trace: Path,
    rank: int,
    task: str,
    on_mismatch: str | None,
    pdb: bool,
    cpu: bool,
    verdict: Path | None,
    program: tuple[str, ...],
) -> None:
    """Run PROGRAM as rank R of the job recorded in DIR.

    \b
      ranklens replay ranklens-trace --rank 5 -- train.py --lr 1e-3
    """
    from ranklens_core.program import Program

    parsed = Program.parse(program)
    take_hash_seed(trace, rank)
    status = replay_program(
        parsed, trace, rank, task, on_mismatch=on_mismatch, pdb=pdb, cpu=cpu, verdict_file=verdict
    )
    sys.exit(status)


def replay_program(
    program: Program,
    directory: Path,
    rank: int,
    task: str,
    *,
    on_mismatch: str | None = None,
    pdb: bool = False,
    cpu: bool = False,
    verdict_file: Path | None = None,
) -> int:
    """Replay and print the verdict; returns the exit status."""
    from ranklens_core.cli.postmortem import stop_in_pdb
    from ranklens_core.leaving import before_exit
    from ranklens_core.patches import Patches
    from ranklens_core.preimport import guess_preimports
    from ranklens_core.program import exit_status, flush_output, print_program_error
    from ranklens_core.replay_session import ReplaySession
    from ranklens_core.standin import cpu_cuda_context, wants_cpu_cuda
    from ranklens_core.task import OnMismatch, task_named
    from ranklens_core.trace import open_trace
    from ranklens_core.verdict import EXIT_STATUS, Status

    chosen = task_named(task)
    trace = open_trace(directory)
    trace.rank(rank)
    _check_program(program, trace.run.program, trace.run.program_fingerprint)
    cpu_cuda = wants_cpu_cuda(cpu, guess_preimports(program)) or trace.run.cpu_cuda
    verdict_file = _claimed(verdict_file)
    pid, stderr = os.getpid(), sys.stderr

    def program_status(error: BaseException | None) -> int:
        """What python would end with; shows an uncaught exception as it would."""
        if error is None:
            return 0
        if isinstance(error, SystemExit):
            return exit_status(error)
        print_program_error(error)
        return 130 if isinstance(error, KeyboardInterrupt) else 1

    def end(error: BaseException | None) -> int:
        try:
            flush_output()
        except OSError as problem:
            _say(stderr, f"ranklens: not all of the program's output could be written: {problem}")
        verdict = session.close(error)
        failed = verdict.status is Status.PROGRAM_FAILED
        status = program_status(error) if failed else EXIT_STATUS[verdict.status]
        _show(verdict, program, directory, verdict_file, stderr)
        return status

    error: BaseException | None = None
    with cpu_cuda_context(cpu_cuda), Patches() as patches:
        session = ReplaySession(
            trace, rank, chosen, on_mismatch=OnMismatch(on_mismatch) if on_mismatch else None
        )
        before_exit(patches, lambda status: end(SystemExit(status)))
        try:
            program.run()
        except BaseException as caught:
            error = caught
            if pdb and not isinstance(caught, SystemExit):
                print_program_error(caught)
                stop_in_pdb(caught)
        if os.getpid() != pid:  # a child that the program forked: it ends as it would without us
            return program_status(error)
        return end(error)


def take_hash_seed(directory: Path, rank: int) -> None:
    """Start over with the recorded PYTHONHASHSEED, before torch has been imported."""
    from ranklens_core.hash_seed import VARIABLE, fix_hash_seed
    from ranklens_core.trace import open_trace

    with open_trace(directory) as trace:
        for item in trace.rank(rank).record.environment:
            if (item.kind, item.name) == ("variable", VARIABLE):
                fix_hash_seed(item.value)


def _claimed(file: Path | None) -> Path | None:
    """``--verdict`` as an absolute path, found writable before the replay and not only after it.

    What an earlier replay wrote there is gone from now on, however this one ends.
    """
    if file is not None:
        _write_verdict(file, b"")
    return file and file.absolute()


def _write_verdict(file: Path, data: bytes) -> None:
    try:
        file.write_bytes(data)
    except OSError as error:
        raise UsageError(
            f"--verdict {file} cannot be written: {error.strerror or error}. Name another file."
        ) from error


def _say(stderr: TextIO | None, text: str) -> None:
    """To stderr as it was before the program, which may have closed it: then there is nobody to tell."""
    if stderr is not None and not stderr.closed:
        click.echo(text, file=stderr)


def _show(
    verdict: Verdict, program: Program, directory: Path, verdict_file: Path | None, stderr: TextIO | None
) -> None:
    command = f"ranklens replay {shlex.quote(str(directory))} --rank {verdict.rank}"
    _say(stderr, verdict.words([f"{command} --pdb -- {program.describe()}"]))
    if verdict_file is not None:
        _write_verdict(verdict_file, verdict.to_json() + b"\n")


def _check_program(program: Program, recorded: str, fingerprint: str) -> None:
    """Say it when another file is replayed than was recorded; the calls decide whether it fits."""
    if fingerprint and program.fingerprint() != fingerprint:
        click.echo(
            f"ranklens: {program.target} is not the file that was recorded (`{recorded}`): "
            "its calls are checked one by one",
            err=True,
        )
