"""Composing configurations with Hydra before it runs anything: of one run, or of each job of a sweep."""

from __future__ import annotations

import copy
import difflib
import importlib.util
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException

from ranklens_core.configs_dir import configs_dir
from ranklens_core.errors import UsageError
from ranklens_core.run.config import NAME, SCHEMA, RunConfig, check
from ranklens_core.run.network_choice import NetworkChoice

VERSION_BASE = "1.3"
BASIC_SWEEPER = "hydra._internal.core_plugins.basic_sweeper.BasicSweeper"


@dataclass(frozen=True)
class Job:
    """One run: its overrides, the checked configuration and the network chosen for its replay."""

    overrides: tuple[str, ...]
    config: RunConfig
    network: NetworkChoice | None


def register() -> None:
    """Make the dataclasses known to Hydra, which keeps them as long as the process lives."""
    ConfigStore.instance().store(name=SCHEMA, node=RunConfig)


def search_path(config_dir: Path | None) -> list[str]:
    """The override that adds the user's own directory of groups.

    Raises UsageError if it is not there.
    """
    if config_dir is None:
        return []
    if not config_dir.is_dir():
        raise UsageError(f"--config-dir {config_dir}: there is no such directory.")
    return [f"hydra.searchpath=['file://{config_dir.absolute()}']"]


def compose_run(overrides: Sequence[str]) -> tuple[Job, str]:
    """The one run of ``overrides``, and its directory. Raises UsageError naming the key that is wrong."""
    with _hydra():
        parsed = _parsed(overrides)
        sweep = next((override for override in parsed if override.is_sweep_override()), None)
        if sweep is not None:
            raise UsageError(f"{sweep.get_key_element()} has several values: a sweep, ranklens run -m ...")
        composed = _composed(overrides)
        return _job(overrides, composed), str(composed.hydra.run.dir)


def compose_sweep(overrides: Sequence[str]) -> tuple[list[Job], str]:
    """All jobs of a sweep, and its directory. No jobs where a sweeper finds them as it goes.

    Raises UsageError naming the key that is wrong, in whichever job.
    """
    with _hydra():
        parsed = _parsed(overrides)
        ours = [override for override in parsed if override.is_hydra_override()]
        fixed = [str(override.input_line) for override in parsed if not override.is_sweep_override()]
        base = _composed([*fixed, "hydra.mode=MULTIRUN"])
        directory = str(base.hydra.sweep.dir)
        _check_launcher(base)
        if base.hydra.sweeper._target_ != BASIC_SWEEPER:
            return [], directory
        params = [f"{key}={value}" for key, value in (base.hydra.sweeper.get("params") or {}).items()]
        swept = [*_parsed(params), *(override for override in parsed if not override.is_hydra_override())]
        (lines,) = BasicSweeper.split_arguments(swept, None)
        lines_of_hydra = [str(override.input_line) for override in ours]
        return [_job(line, _composed([*lines_of_hydra, *line])) for line in lines], directory


def shown(overrides: Sequence[str], part: str) -> DictConfig:
    """The composed configuration: what ``part`` says of ``job``, ``hydra`` and ``all``. Raises UsageError."""
    with _hydra():
        composed = _composed(overrides)
        with read_write(composed), open_dict(composed):
            if part == "job":
                del composed["hydra"]
            elif part == "hydra":
                for key in [key for key in composed if key != "hydra"]:
                    del composed[key]
        return composed


def config_of(composed: DictConfig) -> RunConfig:
    """What Hydra composed, as checked dataclasses. Raises UsageError naming the key that is wrong."""
    if "hydra" in composed:
        composed = copy.deepcopy(composed)
        with read_write(composed), open_dict(composed):
            del composed["hydra"]
    try:
        config = OmegaConf.to_object(composed)
    except OmegaConfBaseException as error:
        raise UsageError(_words(error)) from error
    assert isinstance(config, RunConfig)
    check(config)
    return config


@contextmanager
def _hydra() -> Iterator[None]:
    register()
    try:
        with initialize_config_dir(str(configs_dir()), version_base=VERSION_BASE):
            yield
    except (HydraException, OmegaConfBaseException) as error:
        raise UsageError(_words(error)) from error


def _parsed(overrides: Sequence[str]) -> list[Override]:
    loader = GlobalHydra.instance().config_loader()
    return OverridesParser.create(config_loader=loader).parse_overrides(list(overrides))


def _composed(overrides: Sequence[str]) -> DictConfig:
    return compose(NAME, overrides=list(overrides), return_hydra_config=True)


def _job(overrides: Sequence[str], composed: DictConfig) -> Job:
    chosen = NetworkChoice.of(composed.network, composed.hydra.runtime)
    job = Job(tuple(overrides), config_of(composed), chosen)
    if chosen is not None:
        chosen.check()
    return job


def _check_launcher(base: DictConfig) -> None:
    """Refuse a launcher or sweeper whose plugin is not installed; Hydra would say so after the recording."""
    for part in ("launcher", "sweeper"):
        target = str(base.hydra[part]._target_)
        module = ".".join(target.split(".")[:2])
        if (
            importlib.util.find_spec(module.partition(".")[0]) is None
            or importlib.util.find_spec(module) is None
        ):
            package = module.rpartition(".")[2].replace("_", "-")
            choice = base.hydra.runtime.choices[f"hydra/{part}"]
            raise UsageError(
                f"hydra/{part}={choice} needs {package}, which is not installed: pip install {package}."
            )


def _words(error: Exception) -> str:
    """Hydra's message with its cause's, and a key that is meant perhaps."""
    parts = [str(error).strip()]
    cause = error.__cause__
    if isinstance(cause, OmegaConfBaseException) and str(cause).strip() not in parts[0]:
        parts.append(str(cause).strip())
    lines = [
        line for part in parts for line in part.splitlines() if not line.strip().startswith("object_type=")
    ]
    unknown = getattr(cause, "key", None) or getattr(error, "key", None)
    known = (
        [item.name for item in fields(getattr(cause, "object_type", None) or RunConfig)] if unknown else []
    )
    near = difflib.get_close_matches(str(unknown), known, n=1)
    if near and near[0] != unknown:
        lines.append(f"Did you mean {near[0]}?")
    return "\n".join(lines)
