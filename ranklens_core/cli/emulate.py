"""``ranklens emulate``: one rank of a job that was never recorded, alone."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ranklens_core.cli.options import (
    bandwidth_option,
    cpu_option,
    network_option,
    program_argument,
    verdict_option,
)

if TYPE_CHECKING:
    from ranklens_core.program import Program


@click.command()
@click.option("--world-size", type=int, required=True, metavar="N", help="How many ranks the job has.")
@click.option("--rank", type=int, required=True, metavar="R", help="The rank to run.")
@click.option(
    "--task",
    default="profile",
    show_default=True,
    metavar="profile|tune|memory|structure",
    help="What the emulation is for.",
)
@network_option
@bandwidth_option
@click.option("--pdb", is_flag=True, help="Stop in pdb where an error is raised.")
@cpu_option
@verdict_option
@program_argument
def command(
    world_size: int,
    rank: int,
    task: str,
    network: str | None,
    bandwidth: float,
    pdb: bool,
    cpu: bool,
    verdict: Path | None,
    program: tuple[str, ...],
) -> None:
    """Run PROGRAM as rank R of N, with no recording at all.

    Local computation is real. Results of communication are made up (what N ranks like this one would
    have sent) and labelled so; their times are estimated if a network is named, else none are kept.

    \b
      ranklens emulate --world-size 256 --rank 200 --network h100-ib400 -- train.py
    """
    from ranklens_core.program import Program

    sys.exit(
        emulate_program(
            Program.parse(program),
            world_size,
            rank,
            task,
            network=network,
            bandwidth=bandwidth,
            pdb=pdb,
            cpu=cpu,
            verdict_file=verdict,
        )
    )


def emulate_program(
    program: Program,
    world_size: int,
    rank: int,
    task: str,
    *,
    network: str | None = None,
    bandwidth: float = 1.0,
    pdb: bool = False,
    cpu: bool = False,
    verdict_file: Path | None = None,
) -> int:
    """Emulate and print the verdict; returns the exit status."""
    from ranklens_core.cli.alone import run_alone
    from ranklens_core.emulate_session import EmulateSession
    from ranklens_core.preimport import guess_preimports
    from ranklens_core.standin import wants_cpu_cuda
    from ranklens_core.task import task_named
    from ranklens_core.timing.network import network_named

    chosen = task_named(task)
    described = network_named(network, bandwidth)
    recording = f"ranklens record --nproc {world_size} -- {program.describe()}"
    return run_alone(
        program,
        lambda: EmulateSession(rank, world_size, chosen, described),
        cpu_cuda=wants_cpu_cuda(cpu, guess_preimports(program)),
        pdb=pdb,
        verdict_file=verdict_file,
        next_commands=lambda _: [f"{recording}    (real values, then ranklens replay)"],
    )
