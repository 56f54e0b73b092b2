"""A frozen dataclass from a YAML file, every key and value checked."""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import yaml  # type: ignore[import-untyped]  # PyYAML has no types of its own

from ranklens_core.errors import UsageError

_T = TypeVar("_T")

# Metadata of a number field.
POSITIVE = {"above": 0.0}
NOT_NEGATIVE = {"at_least": 0.0}


def read_mapping(file: Path) -> dict[str, Any]:
    """The keys and values of a YAML file; nothing in it is executed. Raises UsageError."""
    try:
        loaded = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UsageError(f"{file}: not a readable YAML file: {error}") from error
    if not isinstance(loaded, dict):
        raise UsageError(f"{file}: expected keys and values at the top, found {type(loaded).__name__}")
    return loaded


def build(cls: type[_T], values: dict[str, Any], file: Path) -> _T:
    """A frozen dataclass from a file's keys and values, nested ones too.

    Raises UsageError naming the file, the key and what is allowed there: for an unknown or missing key, a
    wrong type, a value outside the field's metadata (``choices``, ``above``, ``at_least``).
    """
    return typing.cast(_T, _build(cls, values, file, ""))


@cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _build(cls: type, values: Any, file: Path, at: str) -> Any:
    """A frozen dataclass from a mapping, every key and value checked. ``at`` is the key's dotted place."""
    if not isinstance(values, dict):
        raise UsageError(f"{file}: {at or 'file'}: expected keys and values, found {values!r}")
    fields = {f.name: f for f in dataclasses.fields(cls)}
    for key in values:
        if key not in fields:
            raise UsageError(f"{file}: unknown key {_join(at, key)!r}; allowed here: {', '.join(fields)}")
    arguments = {}
    for name, spec in fields.items():
        if name in values:
            arguments[name] = _convert(_hints(cls)[name], spec, values[name], file, _join(at, name))
        elif spec.default is dataclasses.MISSING and spec.default_factory is dataclasses.MISSING:
            raise UsageError(f"{file}: missing key {_join(at, name)!r}; needed here: {', '.join(fields)}")
    try:
        return cls(**arguments)
    except UsageError as error:
        raise UsageError(f"{file}: {error}") from error


def _convert(hint: Any, spec: dataclasses.Field[Any], value: Any, file: Path, at: str) -> Any:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        if value is None:
            return None
        hint = next(option for option in typing.get_args(hint) if option is not type(None))
    if dataclasses.is_dataclass(hint):
        return _build(typing.cast(type, hint), value, file, at)
    if typing.get_origin(hint) is tuple:
        if not isinstance(value, list):
            raise UsageError(f"{file}: {at}: expected a list, found {value!r}")
        inner = typing.get_args(hint)[0]
        return tuple(_build(inner, item, file, f"{at}[{i}]") for i, item in enumerate(value))
    if typing.get_origin(hint) is Mapping:
        if not isinstance(value, dict):
            raise UsageError(f"{file}: {at}: expected op: percent pairs, found {value!r}")
        return {
            str(key): _number(float, POSITIVE, number, file, _join(at, key)) for key, number in value.items()
        }
    if hint in (int, float):
        return _number(hint, spec.metadata, value, file, at)
    if not isinstance(value, str):
        raise UsageError(f"{file}: {at}: expected text, found {value!r}")
    choices = spec.metadata.get("choices")
    if choices and value not in choices:
        raise UsageError(f"{file}: {at}: {value!r} is not one of: {', '.join(choices)}")
    return value


def _number(kind: type, metadata: Mapping[str, Any], value: Any, file: Path, at: str) -> Any:
    right = isinstance(value, int) if kind is int else isinstance(value, int | float)
    if not right or isinstance(value, bool) or not math.isfinite(value):
        wanted = "a whole number" if kind is int else "a number"
        raise UsageError(f"{file}: {at}: expected {wanted}, found {value!r}")
    if "above" in metadata and not value > metadata["above"]:
        raise UsageError(f"{file}: {at}: must be above {metadata['above']:g}, found {value!r}")
    if "at_least" in metadata and value < metadata["at_least"]:
        raise UsageError(f"{file}: {at}: must be at least {metadata['at_least']:g}, found {value!r}")
    return kind(value)


def _join(at: str, key: object) -> str:
    return f"{at}.{key}" if at else str(key)
