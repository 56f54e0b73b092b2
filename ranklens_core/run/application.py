"""``ranklens run`` from its arguments to the exit status: check, record what is missing, let Hydra run."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import hydra
from omegaconf import OmegaConf

from ranklens_core.configs_dir import configs_dir
from ranklens_core.errors import RankLensError, UsageError
from ranklens_core.run.commands import program_of, record_command
from ranklens_core.run.compose import VERSION_BASE, Job, compose_run, compose_sweep, search_path, shown
from ranklens_core.run.config import NAME, RunConfig
from ranklens_core.run.job import run_job, say
from ranklens_core.run.recording import ensure, is_there
from ranklens_core.run.sweep import Sweep
from ranklens_core.run.table import table


def show_config(overrides: Sequence[str], config_dir: Path | None, part: str, *, resolve: bool) -> str:
    """The composed configuration as YAML: ``part`` is job, hydra or all. Raises UsageError."""
    composed = shown([*search_path(config_dir), *overrides], part)
    return OmegaConf.to_yaml(composed, resolve=resolve)


def run_once(overrides: Sequence[str], config_dir: Path | None) -> int:
    """Replay one rank, recording its target first if need be; the exit status.

    Raises:
        UsageError: a key or value is wrong; nothing was started.
        TraceError: the trace is missing, or cannot be used.
    """
    overrides = [*search_path(config_dir), *overrides]
    job, directory = compose_run(overrides)
    _see_to_traces([job])
    _hand_over([*overrides, f"hydra.run.dir='{directory}'", "recorded=true"])
    return Sweep.read([Path(directory)]).worst_status


def run_sweep(overrides: Sequence[str], config_dir: Path | None) -> int:
    """Replay all ranks, tasks and what-ifs of a sweep and print its table; the worst exit status.

    Errors as ``run_once``, found in all jobs before the first begins.
    """
    overrides = [*search_path(config_dir), *overrides]
    jobs, directory = compose_sweep(overrides)
    _see_to_traces(jobs)
    recorded = ["recorded=true"] if jobs else []  # else each job sees to its own
    _hand_over(["--multirun", *overrides, f"hydra.sweep.dir='{directory}'", *recorded])
    sweep = Sweep.read_all(Path(directory), expected=len(jobs))
    say(f"\n{table(sweep)}\n\n{directory} holds each job's verdict and output")
    return sweep.worst_status


def _see_to_traces(jobs: Sequence[Job]) -> None:
    """Record what is missing, each trace once, when all of them have been found in order."""
    wanted: dict[str, RunConfig] = {}
    for config in (job.config for job in jobs):
        program_of(config.workload, config.what_if.micro_batches)
        other = wanted.setdefault(config.trace, config)
        if _recording(other) != _recording(config):
            raise UsageError(
                f"the sweep's jobs want different recordings in {config.trace}: `{_recording(other)}` and "
                f"`{_recording(config)}`. Put what differs into the trace's name, as in "
                "trace='traces/${target.name}-${workload.options.steps}', or use what_if.*, which changes "
                "the replay alone."
            )
    for config in wanted.values():
        is_there(config)
    for config in wanted.values():
        ensure(config, say)


def _recording(config: RunConfig) -> str:
    return record_command(
        config, program_of(config.workload), overwrite=config.record.when == "again"
    ).typed()


def _hand_over(arguments: Sequence[str]) -> None:
    """Let Hydra run the application with these arguments."""
    application = hydra.main(str(configs_dir()), NAME, VERSION_BASE)(run_job)
    argv, sys.argv = sys.argv, ["ranklens run", *arguments]
    try:
        application()
    except SystemExit as end:
        if end.code:  # Hydra has said why
            raise HydraFailedError("Hydra could not run the jobs: its message is above.") from end
    finally:
        sys.argv = argv


class HydraFailedError(RankLensError):
    """Hydra, or a launcher or sweeper plugin, gave up."""
