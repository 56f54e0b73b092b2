"""``ranklens record``: inside one rank of a started job, or with local ranks of its own."""

from __future__ import annotations

import os
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ranklens_core.cli.clock import WALL_TIME, Timing, timing_of
from ranklens_core.cli.options import (
    DEFAULT_OUT,
    bandwidth_option,
    cpu_option,
    network_option,
    parse_ranks,
    parse_steps,
    program_argument,
)
from ranklens_core.errors import UsageError

if TYPE_CHECKING:
    from ranklens_core.own_cores import CorePlan
    from ranklens_core.program import Program
    from ranklens_core.schema import RunRecord


@click.command()
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=Path(DEFAULT_OUT),
    show_default=True,
    help="The trace directory.",
)
@click.option("--overwrite", is_flag=True, help="Replace an existing trace.")
@click.option(
    "--nproc",
    type=click.IntRange(min=1),
    metavar="N",
    help="Start N local ranks; without it, record the rank this is.",
)
@click.option(
    "--steps",
    callback=parse_steps,
    metavar="A:B",
    help="Keep inputs to compare in these steps only, and results up to B.",
)
@click.option(
    "--window-only",
    is_flag=True,
    help="With --steps A:B: keep no results of the steps before A. A replay then starts the program from its "
    "own checkpoint of step A (replay --from-step A).",
)
@click.option(
    "--payload", metavar="all|none|R,...", help="Ranks whose results are kept (default with --nproc: all)."
)
@click.option("--pin", is_flag=True, help="With --nproc: keep each rank on a core of its own (in turn).")
@click.option(
    "--clock",
    type=click.Choice(["wall", "virtual"]),
    default="wall",
    show_default=True,
    help="virtual: times are computed from each rank's own compute and --network, so that more ranks than "
    "cores can be recorded.",
)
@network_option
@bandwidth_option
@click.option(
    "--own-core",
    callback=parse_ranks,
    metavar="R[,R...]",
    help="With --nproc and --clock virtual: ranks that get a core each, those that will be replayed; the "
    "others share the rest.",
)
@cpu_option
@program_argument
def command(
    out: Path,
    overwrite: bool,
    nproc: int | None,
    steps: tuple[int, int | None] | None,
    window_only: bool,
    payload: str | None,
    pin: bool,
    clock: str,
    network: str | None,
    bandwidth: float,
    own_core: tuple[int, ...],
    cpu: bool,
    program: tuple[str, ...],
) -> None:
    """Run PROGRAM and record its communication.

    \b
      ranklens record --nproc 8 -- train.py --lr 1e-3
      torchrun --nproc-per-node 8 -m ranklens_core record --payload 0,5 -- train.py
      ranklens record --nproc 64 --clock virtual --network h100-ib400 --own-core 5 -- train.py
    """
    from ranklens_core.hash_seed import fix_hash_seed
    from ranklens_core.program import Program
    from ranklens_core.timing.network import network_named

    if window_only and not (steps and steps[0]):
        raise UsageError("--window-only is for a window that begins later: say --steps A:B with A above 0.")
    parsed = Program.parse(program)
    timing = timing_of(clock, network_named(network, bandwidth), own_core, nproc, pin=pin)
    fix_hash_seed()
    if nproc is not None:
        status = record_local(
            parsed,
            out,
            nproc,
            "all" if payload is None else payload,
            steps,
            window_only=window_only,
            pin=pin,
            cpu=cpu,
            overwrite=overwrite,
            timing=timing,
        )
    else:
        if payload is None:
            raise UsageError(
                "Whose values shall be kept? Say --payload all, none or ranks like 0,5 (all of a large job "
                "can be many gigabytes)."
            )
        status = record_this_rank(
            parsed,
            out,
            payload,
            steps,
            window_only=window_only,
            cpu=cpu,
            overwrite=overwrite,
            timing=timing,
        )
    sys.exit(status)


def record_local(
    program: Program,
    out: Path,
    nproc: int,
    payload: str,
    steps: tuple[int, int | None] | None,
    *,
    window_only: bool = False,
    pin: bool,
    cpu: bool,
    overwrite: bool,
    timing: Timing = WALL_TIME,
) -> int:
    """Record ``nproc`` forked ranks of ``program`` into ``out``; returns the job's exit status."""
    from ranklens_core.cluster import run_local
    from ranklens_core.own_cores import plan_cores
    from ranklens_core.preimport import guess_preimports
    from ranklens_core.standin import cpu_cuda_context, wants_cpu_cuda
    from ranklens_core.trace import JobEnding, open_trace, prepare_directory, write_ending, write_run

    if any(name in os.environ for name in ("RANK", "TORCHELASTIC_RUN_ID")):
        raise UsageError(
            "--nproc starts ranks of its own, but RANK is set: this is a rank already. Leave --nproc out "
            "under torchrun and the like."
        )
    _check_payload(payload, nproc)
    plan = plan_cores(timing.own_cores, nproc) if timing.own_cores else None
    imports = guess_preimports(program)
    cpu_cuda = wants_cpu_cuda(cpu, imports)
    prepare_directory(out, overwrite=overwrite)
    from ranklens_core.record_session import describe_run

    run = timing.describe(describe_run(program, nproc, cpu_cuda=cpu_cuda))
    directory = out.absolute()
    try:
        write_run(directory, run)
    except OSError as error:
        raise UsageError(
            f"{out} cannot be used for a trace: {error.strerror or error}. Name another directory with --out."
        ) from error

    def rank_main(rank: int) -> int:
        if plan is not None:
            plan.settle(rank)
        if pin:
            cores = sorted(os.sched_getaffinity(0))
            os.sched_setaffinity(0, {cores[rank % len(cores)]})
        return _run_recorded(program, directory, payload, steps, run, window_only=window_only, plan=plan)

    with cpu_cuda_context(cpu_cuda), plan.kept_awake() if plan else nullcontext():
        result = run_local(
            nproc,
            rank_main,
            preimport=[*imports, "ranklens_core.session"],
        )
    first = result.first_failure
    ending = JobEnding(
        first_failure=None if first is None else first.rank,
        status=result.status,
        signal=0 if first is None else first.signum or 0,
        interrupted_by=result.interrupted_by or 0,
    )
    try:
        write_ending(directory, ending)
    except OSError as error:
        click.echo(f"ranklens: {out} does not say how the job ended: {error}", err=True)
    if result.first_failure is not None:
        click.echo(f"ranklens: {result.first_failure.describe()}", err=True)
    trace = open_trace(directory)
    click.echo(f"ranklens: recorded {len(trace.ranks)} of {nproc} ranks in {out}", err=True)
    if result.status == 0 and not any(trace.rank(rank).calls.num_rows for rank in trace.ranks):
        click.echo(
            "ranklens: no call was recorded: the program made no communication in the processes that "
            "RankLens started (it may have started ranks of its own: run it under torchrun instead).",
            err=True,
        )
    return result.status


def record_this_rank(
    program: Program,
    out: Path,
    payload: str,
    steps: tuple[int, int | None] | None,
    *,
    window_only: bool = False,
    cpu: bool,
    overwrite: bool,
    timing: Timing = WALL_TIME,
) -> int:
    """Record the rank that this process is, started by a launcher; returns the exit status."""
    from ranklens_core.place import RankEnvironment, run_id_of
    from ranklens_core.preimport import guess_preimports
    from ranklens_core.record_session import describe_run
    from ranklens_core.standin import cpu_cuda_context, wants_cpu_cuda

    place = RankEnvironment.from_environ(os.environ)
    _check_payload(payload, place.world_size)
    cpu_cuda = wants_cpu_cuda(cpu, guess_preimports(program))
    run = timing.describe(
        describe_run(program, place.world_size, cpu_cuda=cpu_cuda, run_id=run_id_of(os.environ))
    )
    with cpu_cuda_context(cpu_cuda):
        return _run_recorded(
            program, out.absolute(), payload, steps, run, window_only=window_only, overwrite=overwrite
        )


def _run_recorded(
    program: Program,
    directory: Path,
    payload: str,
    steps: tuple[int, int | None] | None,
    run: RunRecord,
    *,
    window_only: bool = False,
    overwrite: bool = False,
    plan: CorePlan | None = None,
) -> int:
    from ranklens_core.session import record

    with record(
        directory,
        payload=payload,
        steps=steps,
        window_only=window_only,
        run=run,
        overwrite=overwrite,
        cores=plan,
    ):
        program.run()
    return 0


def _check_payload(payload: str, world_size: int) -> None:
    from ranklens_core.record_session import keeps_values

    keeps_values(payload, 0)
    if payload not in ("all", "none"):
        outside = [part for part in payload.split(",") if not 0 <= int(part) < world_size]
        if outside:
            raise UsageError(
                f"--payload {payload}: rank {outside[0]} is outside the world of {world_size} ranks."
            )
