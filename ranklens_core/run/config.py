"""The dataclasses behind the YAML files of ``configs/``, and what may be written in them.

OmegaConf checks keys and types while it composes; ``check`` does the rest. Every error names the key.
"""

from __future__ import annotations

import math
import shlex
from dataclasses import dataclass, field
from typing import Any, NoReturn

from omegaconf import MISSING

from ranklens_core.errors import UsageError
from ranklens_core.settings import parse_window
from ranklens_core.task import TASKS, OnMismatch, Task

NAME = "run"
"""Of the application's own file, ``configs/run.yaml``."""

SCHEMA = "ranklens_run"
"""The name in Hydra's store that ``configs/run.yaml`` has its types from."""

WHEN = {
    "once": "record if there is no trace yet",
    "never": "only replay: a missing trace is an error",
    "again": "record anew and replace the trace",
}


@dataclass
class TargetConfig:
    """A job's world and its layout: ``tp * pp * dp`` ranks. ``ep`` ranks share a layer's experts, ``vp`` is
    the number of model chunks a pipeline stage has, ``zero`` DeepSpeed's stage."""

    name: str = MISSING
    description: str = ""
    world_size: int = MISSING
    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1
    vp: int = 1
    zero: int = 0


@dataclass
class WorkloadConfig:
    """A program: a ``.py`` file or ``-m module``. ``options`` become ``--KEY VALUE`` (true: ``--KEY``; null
    and false: nothing), ``arguments`` follow as they are, ``environment`` are variables.

    ``micro_batches`` is the key in ``options`` that says how many micro-batches a step has; ``requires`` the
    package that the program cannot do without; ``cpu`` runs a CUDA-only program on the CPU.
    """

    name: str = MISSING
    description: str = ""
    program: str = MISSING
    requires: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    arguments: list[str] = field(default_factory=list)
    environment: dict[str, Any] = field(default_factory=dict)
    micro_batches: str | None = None
    cpu: bool = False


@dataclass
class TaskConfig:
    """What the replay is for."""

    name: str = "debug"
    on_mismatch: str | None = None


@dataclass
class RecordConfig:
    """How the target is recorded. ``when`` is a key of ``WHEN``; the others are options of ``ranklens
    record``: ``own_core`` ranks and ``network`` are for the virtual clock."""

    when: str = "once"
    payload: str = "all"
    steps: str | None = None
    pin: bool = False
    clock: str = "wall"
    network: str | None = None
    own_core: list[int] = field(default_factory=list)


@dataclass
class WhatIfConfig:
    """Changes of the replay against the recording: a factor on the bandwidth of ``network`` (or of the
    recorded virtual network), and another number of micro-batches a step."""

    bandwidth: float = 1.0
    micro_batches: int | None = None


@dataclass
class RunConfig:
    """All of ``ranklens run``. ``trace`` is the directory of the target's trace; ``network`` a group of
    ``configs/network``, whose content estimates times in the replay.

    ``recorded`` is RankLens' own: the trace was seen to before a sweep's jobs began.
    """

    target: TargetConfig = field(default_factory=TargetConfig)
    workload: WorkloadConfig = field(default_factory=WorkloadConfig)
    task: TaskConfig = field(default_factory=TaskConfig)
    network: dict[str, Any] | None = None
    record: RecordConfig = field(default_factory=RecordConfig)
    what_if: WhatIfConfig = field(default_factory=WhatIfConfig)
    rank: int = 0
    trace: str = MISSING
    recorded: bool = False

    @property
    def how(self) -> Task:
        """The task."""
        return TASKS[self.task.name]

    @property
    def stops(self) -> bool:
        """Whether a call that is not the recorded one ends the replay."""
        return (self.task.on_mismatch or self.how.on_mismatch) == OnMismatch.STOP


def check(config: RunConfig) -> None:
    """Refuse what cannot be run, before anything starts. Raises UsageError naming the key."""
    _check_target(config.target)
    if not 0 <= config.rank < config.target.world_size:
        _wrong(
            "rank",
            config.rank,
            f"the ranks of target {config.target.name}, 0 to {config.target.world_size - 1}",
        )
    if config.trace == "":
        _wrong("trace", config.trace, "a directory")
    _check_workload(config.workload)
    if config.task.name not in TASKS:
        _wrong("task.name", config.task.name, ", ".join(TASKS))
    if config.task.on_mismatch not in (None, *OnMismatch):
        _wrong("task.on_mismatch", config.task.on_mismatch, ", ".join(OnMismatch))
    _check_record(config.record, config.target.world_size)
    _check_what_if(config)


def _check_target(target: TargetConfig) -> None:
    for key in ("world_size", "tp", "pp", "dp", "ep", "vp"):
        if getattr(target, key) < 1:
            _wrong(f"target.{key}", getattr(target, key), "1 or more")
    if not 0 <= target.zero <= 3:
        _wrong("target.zero", target.zero, "ZeRO's stages, 0 to 3")
    ranks = target.tp * target.pp * target.dp
    if ranks != target.world_size:
        raise UsageError(
            f"target.world_size is {target.world_size}, but target.tp * target.pp * target.dp = "
            f"{target.tp} * {target.pp} * {target.dp} = {ranks}. Change one of them."
        )
    if target.dp % target.ep:
        _wrong("target.ep", target.ep, f"a divisor of target.dp, {target.dp}")


def _check_workload(workload: WorkloadConfig) -> None:
    try:
        words = shlex.split(workload.program)
    except ValueError:
        words = []
    if not words:
        _wrong("workload.program", workload.program, "a .py file or `-m module`")
    if workload.micro_batches is not None and workload.micro_batches not in workload.options:
        _wrong(
            "workload.micro_batches", workload.micro_batches, f"a key of workload.options: {_keys(workload)}"
        )
    for key, value in workload.environment.items():
        if isinstance(value, dict | list):
            _wrong(f"workload.environment.{key}", value, "a text or a number")
    for key, value in workload.options.items():
        if isinstance(value, dict):
            _wrong(f"workload.options.{key}", value, "a value or a list of values")


def _check_record(record: RecordConfig, world_size: int) -> None:
    if record.when not in WHEN:
        _wrong("record.when", record.when, ", ".join(WHEN))
    if record.clock not in ("wall", "virtual"):
        _wrong("record.clock", record.clock, "wall, virtual")
    if record.payload not in ("all", "none"):
        parts = record.payload.split(",")
        if not all(part.isascii() and part.isdigit() and int(part) < world_size for part in parts):
            _wrong("record.payload", record.payload, f"all, none or ranks below {world_size} like '0,5'")
    if record.steps is not None:
        try:
            parse_window(record.steps)
        except ValueError:
            _wrong("record.steps", record.steps, 'A:B with 0 <= A < B, or "A:"')
    if record.clock == "wall" and (record.network is not None or record.own_core):
        key = "network" if record.network is not None else "own_core"
        raise UsageError(f"record.{key} is for the virtual clock: record=virtual, or leave it out.")
    if record.clock == "virtual" and record.network is None:
        raise UsageError(
            "record.network is missing: the virtual clock needs the network whose transfers it estimates, "
            "say record.network=h100-ib400."
        )
    for rank in record.own_core:
        if not 0 <= rank < world_size:
            _wrong("record.own_core", record.own_core, f"ranks from 0 to {world_size - 1}")


def _check_what_if(config: RunConfig) -> None:
    what_if, virtual = config.what_if, config.record.clock == "virtual"
    if not (what_if.bandwidth > 0 and math.isfinite(what_if.bandwidth)):
        _wrong("what_if.bandwidth", what_if.bandwidth, "a factor above 0")
    has_effect = config.how.keeps_time and (virtual or not config.stops)
    for key, is_set in (
        ("what_if.bandwidth", what_if.bandwidth != 1.0),
        ("network", config.network is not None),
    ):
        if is_set and not has_effect:
            raise UsageError(
                f"{key} would change nothing: task {config.task.name} of a trace with the "
                f"{config.record.clock} clock estimates no time. Use task=tune, or task=profile with "
                "record=virtual."
            )
    if what_if.bandwidth != 1.0 and config.network is None and not virtual:
        raise UsageError("what_if.bandwidth scales a network: name it, say network=h100-ib400.")
    if what_if.micro_batches is None:
        return
    if what_if.micro_batches < 1:
        _wrong("what_if.micro_batches", what_if.micro_batches, "1 or more")
    if config.workload.micro_batches is None:
        raise UsageError(
            "what_if.micro_batches needs to know which option of the program it changes: name it with "
            f"workload.micro_batches, one of workload.options: {_keys(config.workload)}."
        )
    if config.stops:
        raise UsageError(
            f"what_if.micro_batches makes other calls than were recorded, at which task {config.task.name} "
            "stops. Use task=tune (time), task=memory or task=structure."
        )


def _keys(workload: WorkloadConfig) -> str:
    return ", ".join(workload.options) or "(there is none)"


def _wrong(key: str, value: Any, allowed: str) -> NoReturn:
    raise UsageError(f"{key} is {value!r}. Allowed: {allowed}.")
