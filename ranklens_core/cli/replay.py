"""``ranklens replay``: one rank of a recorded job, alone."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ranklens_core.cli.options import (
    cpu_option,
    program_argument,
    trace_argument,
    verdict_option,
)

if TYPE_CHECKING:
    from ranklens_core.program import Program
    from ranklens_core.replay_session import ReplaySession
    from ranklens_core.verdict import Verdict


@click.command()
@trace_argument
@click.option("--rank", type=int, required=True, metavar="R", help="The rank to run.")
@click.option(
    "--task", default="debug", show_default=True, metavar="debug|structure", help="What the replay is for."
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
    from ranklens_core.preimport import guess_preimports
    from ranklens_core.program import exit_status, print_program_error
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
    error: BaseException | None = None
    with cpu_cuda_context(cpu_cuda):
        session = ReplaySession(
            trace, rank, chosen, on_mismatch=OnMismatch(on_mismatch) if on_mismatch else None
        )
        try:
            program.run()
        except BaseException as caught:
            error = caught
            if pdb and not isinstance(caught, SystemExit):
                print_program_error(caught)
                stop_in_pdb(caught)
        finally:
            sys.stdout.flush()
            verdict = session.close(error)
    if verdict.status is Status.PROGRAM_FAILED and error is not None and not isinstance(error, SystemExit):
        print_program_error(error)
    _show(verdict, session, program, directory, verdict_file)
    if verdict.status is not Status.PROGRAM_FAILED:
        return EXIT_STATUS[verdict.status]
    if isinstance(error, SystemExit):
        return exit_status(error)
    return 130 if isinstance(error, KeyboardInterrupt) else 1


def _show(
    verdict: Verdict, session: ReplaySession, program: Program, directory: Path, verdict_file: Path | None
) -> None:
    command = f"ranklens replay {directory} --rank {verdict.rank}"
    click.echo(verdict.words([f"{command} --pdb -- {program.describe()}"]), err=True)
    if verdict_file is not None:
        verdict_file.write_bytes(verdict.to_json() + b"\n")


def _check_program(program: Program, recorded: str, fingerprint: str) -> None:
    """Say it when another file is replayed than was recorded; the calls decide whether it fits."""
    if fingerprint and program.fingerprint() != fingerprint:
        click.echo(
            f"ranklens: {program.target} is not the file that was recorded (`{recorded}`): "
            "its calls are checked one by one",
            err=True,
        )
