"""One job of ``ranklens run``: the function that Hydra calls, in this process or in a launcher's worker."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import msgspec
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from ranklens_core.errors import RankLensError
from ranklens_core.run.commands import Command, program_of, replay_command
from ranklens_core.run.compose import config_of
from ranklens_core.run.network_choice import NetworkChoice
from ranklens_core.run.recording import ensure

OUTCOME, VERDICT, OUTPUT = "job.json", "verdict.json", "output.txt"
"""Files in a job's directory: ``Outcome``, the verdict of its replay, and in a sweep what that printed."""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """How a job ended. ``command`` is the replay as a user would type it, ``error`` why there was none;
    ``peak_rss_bytes`` the most that the whole replay had in memory."""

    overrides: tuple[str, ...]
    trace: str = ""
    rank: int = 0
    task: str = ""
    command: str = ""
    status: int = 0
    error: str = ""
    peak_rss_bytes: int = 0


def run_job(composed: DictConfig) -> int:
    """Replay the rank that ``composed`` names, recording its target first if nobody has; the exit status.

    Never raises: ``job.json`` in the job's directory tells how it ended, whichever launcher ran it.
    """
    hydra = HydraConfig.get()
    directory = Path(hydra.runtime.output_dir)
    in_sweep = hydra.mode is RunMode.MULTIRUN
    outcome = Outcome(overrides=tuple(map(str, hydra.overrides.task)))
    try:
        with contextlib.chdir(hydra.runtime.cwd):  # a worker of another machine begins elsewhere
            outcome = _replay(composed, hydra.runtime, directory, outcome, in_sweep=in_sweep)
    except RankLensError as error:
        outcome = msgspec.structs.replace(outcome, status=error.exit_status, error=str(error))
        print(f"ranklens: {error}", file=sys.stderr, flush=True)
    (directory / OUTCOME).write_bytes(msgspec.json.format(msgspec.json.encode(outcome), indent=1) + b"\n")
    return outcome.status


def _replay(
    composed: DictConfig, runtime: object, directory: Path, outcome: Outcome, *, in_sweep: bool
) -> Outcome:
    network = NetworkChoice.of(composed.network, runtime)
    config = config_of(composed)
    if not config.recorded:
        ensure(config, say)
    here = os.path.relpath(directory)
    shown = directory if here.startswith("..") else Path(here)
    program = program_of(config.workload, config.what_if.micro_batches)
    command = replay_command(config, program, network.option(shown) if network else None, shown / VERDICT)
    say(f"$ {command.typed()}")
    status, peak_rss = _run(command, directory / OUTPUT if in_sweep else None)
    if in_sweep:
        say(f"  rank {config.rank} ended with status {status}: {shown / OUTPUT}")
    return msgspec.structs.replace(
        outcome,
        trace=config.trace,
        rank=config.rank,
        task=config.task.name,
        command=command.typed(),
        status=status,
        peak_rss_bytes=peak_rss,
    )


def _run(command: Command, output: Path | None) -> tuple[int, int]:
    """Run it, its output to the file or, without one, to ours. Exit status and peak of memory, bytes."""
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(open(output, "wb")) if output is not None else None
        process = subprocess.Popen(
            command.argv(),
            stdin=None if file is None else subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT if file is not None else None,
            env=command.environ(),
        )
        status, usage = _wait(process)
    return (status if status >= 0 else 128 - status), usage


def _wait(process: subprocess.Popen[bytes]) -> tuple[int, int]:
    while True:
        try:
            _, raw, usage = os.wait4(process.pid, 0)
        except KeyboardInterrupt:  # the terminal sent it to the replay too, whose answer it is to give
            continue
        process.returncode = os.waitstatus_to_exitcode(raw)
        # Linux counts in KiB, macOS in bytes
        return process.returncode, usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def say(text: str) -> None:
    """A line for the person at the terminal; standard output is the program's."""
    print(text, file=sys.stderr, flush=True)
