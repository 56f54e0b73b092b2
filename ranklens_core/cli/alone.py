"""Runs PROGRAM as one rank alone, in a replay or an emulation, up to the verdict and the exit status."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TextIO

import click

from ranklens_core.errors import UsageError

if TYPE_CHECKING:
    from ranklens_core.program import Program
    from ranklens_core.verdict import Verdict


class Session(Protocol):
    """A replay or an emulation that has begun."""

    def close(self, error: BaseException | None = None) -> Verdict:
        """End it and judge."""
        ...


def run_alone(
    program: Program,
    begin: Callable[[], Session],
    *,
    cpu_cuda: bool,
    pdb: bool,
    verdict_file: Path | None,
    next_commands: Callable[[Verdict], Sequence[str]],
) -> int:
    """Run ``program`` inside the session that ``begin`` makes, print the verdict; the exit status."""
    from ranklens_core.cli.postmortem import stop_in_pdb
    from ranklens_core.leaving import before_exit
    from ranklens_core.patches import Patches
    from ranklens_core.program import exit_status, flush_output, print_program_error
    from ranklens_core.standin import cpu_cuda_context
    from ranklens_core.verdict import EXIT_STATUS, Status

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
        _say(stderr, verdict.words(next_commands(verdict)))
        if verdict_file is not None:
            _write_verdict(verdict_file, verdict.to_json() + b"\n")
        return status

    error: BaseException | None = None
    with cpu_cuda_context(cpu_cuda), Patches() as patches:
        session = begin()
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


def _claimed(file: Path | None) -> Path | None:
    """``--verdict`` as an absolute path, found writable before the run and not only after it.

    What an earlier one wrote there is gone from now on, however this one ends.
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
