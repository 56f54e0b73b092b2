"""``ranklens replay``: one rank of a recorded job, alone."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ranklens_core.cli.options import (
    bandwidth_option,
    cpu_option,
    network_option,
    program_argument,
    trace_argument,
    verdict_option,
)

if TYPE_CHECKING:
    from ranklens_core.program import Program


DEFAULT_TASK = "debug"


@click.command()
@trace_argument
@click.option("--rank", type=int, required=True, metavar="R", help="The rank to run.")
@click.option(
    "--task",
    default=DEFAULT_TASK,
    show_default=True,
    metavar="debug|profile|memory|tune|structure",
    help="What the replay is for.",
)
@click.option(
    "--on-mismatch",
    type=click.Choice(["stop", "estimate", "report"]),
    help="What to do with a call that is not the recorded one (default: the task's).",
)
@click.option(
    "--from-step",
    type=click.IntRange(min=0),
    metavar="A",
    help="The program starts with step A, from its own checkpoint (give it the options that load that).",
)
@click.option("--pdb", is_flag=True, help="Stop in pdb where an error is raised.")
@network_option
@bandwidth_option
@cpu_option
@verdict_option
@program_argument
def command(
    trace: Path,
    rank: int,
    task: str,
    on_mismatch: str | None,
    from_step: int | None,
    pdb: bool,
    network: str | None,
    bandwidth: float,
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
        parsed,
        trace,
        rank,
        task,
        on_mismatch=on_mismatch,
        from_step=from_step,
        pdb=pdb,
        cpu=cpu,
        verdict_file=verdict,
        network=network,
        bandwidth=bandwidth,
    )
    sys.exit(status)


def replay_program(
    program: Program,
    directory: Path,
    rank: int,
    task: str,
    *,
    on_mismatch: str | None = None,
    from_step: int | None = None,
    pdb: bool = False,
    cpu: bool = False,
    verdict_file: Path | None = None,
    network: str | None = None,
    bandwidth: float = 1.0,
) -> int:
    """Replay and print the verdict; returns the exit status."""
    from ranklens_core.cli.alone import run_alone
    from ranklens_core.preimport import guess_preimports
    from ranklens_core.replay_session import ReplaySession
    from ranklens_core.standin import wants_cpu_cuda
    from ranklens_core.task import OnMismatch, task_named
    from ranklens_core.timing.network import network_named
    from ranklens_core.trace import open_trace

    chosen = task_named(task)
    described = network_named(network, bandwidth)
    trace = open_trace(directory)
    trace.rank(rank)
    _check_program(program, trace.run.program, trace.run.program_fingerprint)
    again = ["ranklens", "replay", str(directory), "--rank", str(rank)]
    again += ["--task", task] if task != DEFAULT_TASK else []
    again += ["--on-mismatch", on_mismatch] if on_mismatch else []
    again += ["--from-step", str(from_step)] if from_step is not None else []
    again += ["--network", network] if network else []
    again += ["--bandwidth", f"{bandwidth:g}"] if bandwidth != 1.0 else []
    again += ["--pdb"]
    return run_alone(
        program,
        lambda: ReplaySession(
            trace,
            rank,
            chosen,
            on_mismatch=OnMismatch(on_mismatch) if on_mismatch else None,
            from_step=from_step,
            network=described,
        ),
        cpu_cuda=wants_cpu_cuda(cpu, guess_preimports(program)) or trace.run.cpu_cuda,
        pdb=pdb,
        verdict_file=verdict_file,
        next_commands=lambda _: [f"{shlex.join(again)} -- {program.describe()}"],
    )


def take_hash_seed(directory: Path, rank: int) -> None:
    """Start over with the recorded PYTHONHASHSEED, before torch has been imported."""
    from ranklens_core.hash_seed import VARIABLE, fix_hash_seed
    from ranklens_core.trace import open_trace

    with open_trace(directory) as trace:
        for item in trace.rank(rank).record.environment:
            if (item.kind, item.name) == ("variable", VARIABLE):
                fix_hash_seed(item.value)


def _check_program(program: Program, recorded: str, fingerprint: str) -> None:
    """Say it when another file is replayed than was recorded; the calls decide whether it fits."""
    if fingerprint and program.fingerprint() != fingerprint:
        click.echo(
            f"ranklens: {program.target} is not the file that was recorded (`{recorded}`): "
            "its calls are checked one by one",
            err=True,
        )
