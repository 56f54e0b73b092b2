"""The ``record`` and ``replay`` commands that a configuration stands for, as a user would type them."""

from __future__ import annotations

import importlib.util
import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ranklens_core.errors import UsageError
from ranklens_core.program import Program
from ranklens_core.run.config import RunConfig, WorkloadConfig


@dataclass(frozen=True)
class Command:
    """``ranklens ARGS`` in an environment with ``variables`` added."""

    args: tuple[str, ...]
    variables: Mapping[str, str] = field(default_factory=dict)

    def typed(self) -> str:
        """What a user would type."""
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.variables.items()]
        return " ".join([*variables, "ranklens", shlex.join(self.args)])

    def argv(self) -> list[str]:
        """The same for this interpreter."""
        return [sys.executable, "-m", "ranklens_core", *self.args]

    def environ(self) -> dict[str, str]:
        """The environment to run it in."""
        return {**os.environ, **self.variables}


def program_of(workload: WorkloadConfig, micro_batches: int | None = None) -> Program:
    """The workload's program, with another number of micro-batches if one is given.

    Raises:
        UsageError: there is no such program, or what it ``requires`` is not installed; the key is named.
    """
    options = dict(workload.options)
    if micro_batches is not None:
        assert workload.micro_batches is not None
        options[workload.micro_batches] = micro_batches
    if workload.requires is not None and not _is_installed(workload.requires):
        package = workload.requires.partition(".")[0]
        raise UsageError(
            f"workload {workload.name} needs {workload.requires}, which is not installed: pip install "
            f"'ranklens[{package}]'."
        )
    try:
        return Program.parse([*shlex.split(workload.program), *_words(options), *workload.arguments])
    except UsageError as error:
        raise UsageError(f"workload.program: {error}") from error


def record_command(config: RunConfig, program: Program, *, overwrite: bool) -> Command:
    """Records the target on local ranks."""
    record = config.record
    args = ["record", "--nproc", str(config.target.world_size), "--out", config.trace]
    for given, option in (
        (overwrite, ["--overwrite"]),
        (record.payload != "all", ["--payload", record.payload]),
        (record.steps is not None, ["--steps", str(record.steps)]),
        (record.pin, ["--pin"]),
        (record.clock != "wall", ["--clock", record.clock, "--network", str(record.network)]),
        (record.own_core, ["--own-core", ",".join(map(str, record.own_core))]),
        (config.workload.cpu, ["--cpu"]),
    ):
        args += option if given else []
    return Command((*args, "--", *shlex.split(program.describe())), _variables(config.workload))


def replay_command(config: RunConfig, program: Program, network: str | None, verdict: Path) -> Command:
    """Replays ``config.rank``; ``network`` is a name or a file."""
    args = ["replay", config.trace, "--rank", str(config.rank)]
    for given, option in (
        (config.task.name != "debug", ["--task", config.task.name]),
        (config.task.on_mismatch is not None, ["--on-mismatch", str(config.task.on_mismatch)]),
        (network is not None, ["--network", str(network)]),
        (config.what_if.bandwidth != 1.0, ["--bandwidth", f"{config.what_if.bandwidth:g}"]),
        (config.workload.cpu, ["--cpu"]),
    ):
        args += option if given else []
    args += ["--verdict", str(verdict), "--", *shlex.split(program.describe())]
    return Command(tuple(args), _variables(config.workload))


def _words(options: Mapping[str, Any]) -> list[str]:
    """``--KEY VALUE`` for each; the key as it was written."""
    words = []
    for key, value in options.items():
        if value is None or value is False:
            continue
        values = [] if value is True else value if isinstance(value, list) else [value]
        words += [f"--{key}", *map(str, values)]
    return words


def _variables(workload: WorkloadConfig) -> dict[str, str]:
    return {name: str(value) for name, value in workload.environment.items() if value is not None}


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False
