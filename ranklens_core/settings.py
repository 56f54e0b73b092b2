"""What a front door is told: the settings that DeepSpeed's config block and Megatron's flags share, checked.

A front door is a framework's own configuration: the ``"ranklens"`` block of a DeepSpeed config, the
``--ranklens-*`` flags of a Megatron script. Both name the same settings, each in its own spelling.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import msgspec

from ranklens_core.errors import UsageError
from ranklens_core.task import TASKS


class Mode(StrEnum):
    """What RankLens does with the program."""

    RECORD = "record"
    REPLAY = "replay"
    EMULATE = "emulate"
    OFF = "off"


DEFAULT_TRACE = "ranklens-trace"


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """All settings of a front door. Those that the mode does not use may stay: only ``mode`` is changed
    between recording and replaying.

    ``steps`` is ``A:B`` (counted from 0) or ``A:``, ``payload`` ``all``, ``none`` or ranks ``R,R``.
    """

    mode: Mode | None = None
    trace: str = DEFAULT_TRACE
    rank: int | None = None
    world_size: int | None = None
    task: str = "debug"
    steps: str | None = None
    window_only: bool = False
    from_step: int | None = None
    payload: str | None = None
    network: str | None = None
    verdict: str | None = None
    overwrite: bool = False

    @property
    def acting_mode(self) -> Mode:
        """``mode``, or without one a replay if a rank is named, else off."""
        if self.mode is not None:
            return self.mode
        return Mode.OFF if self.rank is None else Mode.REPLAY

    @property
    def window(self) -> tuple[int, int | None] | None:
        """``steps`` as (A, B); B is None for ``A:``."""
        return None if self.steps is None else parse_window(self.steps)


@dataclass(frozen=True)
class Key:
    """One setting: what it may be, and what it is for, in words."""

    allowed: str
    about: str


KEYS: dict[str, Key] = {
    "mode": Key(
        "record, replay, emulate or off",
        "what to do: record this job, replay one of its ranks alone, emulate a rank of a job that was never "
        "recorded, or nothing (default: replay if a rank is given, else off)",
    ),
    "trace": Key("a directory", f"where the trace is or goes (default: {DEFAULT_TRACE})"),
    "rank": Key("a rank of the job, 0 or more", "the rank to replay or emulate"),
    "world_size": Key(
        "a number of ranks, 1 or more", "how many ranks the emulated job has; for a trace: as a check"
    ),
    "task": Key(", ".join(TASKS), "what the replay is for (default: debug)"),
    "steps": Key(
        'A:B with 0 <= A < B, or "A:"', "keep inputs to compare in these steps only, and results up to B"
    ),
    "window_only": Key(
        "true or false",
        "keep no results of the steps before `steps`: they are replayed from the program's own checkpoint",
    ),
    "from_step": Key(
        "a step, 0 or more", "the step that the program starts a replay with, from its own checkpoint"
    ),
    "payload": Key("all, none or ranks like 0,5", "whose results are kept while recording"),
    "network": Key(
        "a name in configs/network or a YAML file", "the network that estimated times are taken from"
    ),
    "verdict": Key("a file", "where the verdict goes, as JSON"),
    "overwrite": Key("true or false", "replace an existing trace while recording"),
}
"""Every key of ``Settings``, in the order of the documentation."""


@dataclass(frozen=True)
class Spelling:
    """How a front door writes a setting: ``pattern`` with the key at ``{}``, and where it was written."""

    pattern: str
    where: str
    dashes: bool = False

    def key(self, name: str) -> str:
        """The key as the user writes it."""
        return self.pattern.format(name.replace("_", "-") if self.dashes else name)

    def error(self, name: str, problem: str) -> UsageError:
        """A ``UsageError`` that names the key and the place."""
        return UsageError(f"{self.where}: {self.key(name)} {problem}")


def read_settings(values: Mapping[str, Any], spelling: Spelling) -> Settings:
    """``values`` as ``Settings``; strings are taken for numbers where one is meant.

    Raises:
        UsageError: an unknown key or a value that is not allowed; it names the key, what is allowed, and
            where that was written.
    """
    for name in values:
        if name not in KEYS:
            known = ", ".join(spelling.key(key) for key in KEYS)
            raise UsageError(f"{spelling.where}: there is no {spelling.key(name)}. There are: {known}.")
    checked: dict[str, Any] = {}
    for field in msgspec.structs.fields(Settings):
        if field.name not in values:
            continue
        value = values[field.name]
        try:
            checked[field.name] = msgspec.convert(_in_words(field.name, value), field.type, strict=False)
        except msgspec.ValidationError:
            raise _not_allowed(field.name, value, spelling) from None
    settings = Settings(**checked)
    for name in checked:
        if not _is_allowed(name, getattr(settings, name)):
            raise _not_allowed(name, values[name], spelling)
    return settings


def check_world(settings: Settings, world_size: int, origin: str, spelling: Spelling) -> None:
    """Refuse settings that contradict the job's ``world_size``, which ``origin`` says.

    Raises:
        UsageError: another ``world_size``, or a rank outside the world.
    """
    if settings.world_size is not None and settings.world_size != world_size:
        raise spelling.error(
            "world_size", f"is {settings.world_size}, but {origin} has {world_size} ranks. Leave it out."
        )
    if settings.rank is not None and settings.rank >= world_size:
        raise spelling.error("rank", f"is {settings.rank}, but {origin} has the ranks 0 to {world_size - 1}.")


def parse_window(text: str) -> tuple[int, int | None]:
    """``A:B`` as (A, B), ``A:`` as (A, None). Raises ``ValueError`` for anything else."""
    first, colon, end = text.partition(":")
    window = (int(first or 0), int(end) if end else None)
    if not colon or window[0] < 0 or (window[1] is not None and window[1] <= window[0]):
        raise ValueError(text)
    return window


def _in_words(name: str, value: Any) -> Any:
    """JSON may write ``"payload": [0, 5]``, ``5`` or ``true``; ``null`` is as good as leaving a key out."""
    if name == "payload" and isinstance(value, list) and all(type(rank) is int for rank in value):
        return ",".join(map(str, value))
    if name == "payload" and isinstance(value, bool):
        return "all" if value else "none"
    if name == "payload" and isinstance(value, int):
        return str(value)
    if name in ("rank", "world_size") and isinstance(value, bool | float):
        raise msgspec.ValidationError(name)
    return value


def _is_allowed(name: str, value: Any) -> bool:
    if value is None:
        return True
    if name == "task":
        return value in TASKS
    if name in ("rank", "world_size"):
        least = 1 if name == "world_size" else 0
        return isinstance(value, int) and value >= least
    if name == "steps":
        try:
            parse_window(value)
        except ValueError:
            return False
    if name == "payload":
        return value in ("all", "none") or all(part.isascii() and part.isdigit() for part in value.split(","))
    return bool(value != "")


def _not_allowed(name: str, value: Any, spelling: Spelling) -> UsageError:
    return spelling.error(name, f"is {value!r}. Allowed: {KEYS[name].allowed}.")
