"""What a test's ``ranklens`` marker says, checked, and where its trace lies."""

from __future__ import annotations

import os
import re
import shlex
import unittest
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, cast

import pytest

from ranklens_core.pytest_plugin.failing import fail

SIGNATURE = "ranklens(trace=None, *, rank, world_size=None, payload='all', cpu=False)"
"""The marker as ``pytest --markers`` shows it."""

RANK_PARAMETER = "_ranklens_rank"
"""The parameter that a test with several ranks gets."""

TRACES = "traces"
"""Where the traces of tests that name none lie, beside the test's file."""

_KEYS = ("trace", "rank", "world_size", "payload", "cpu")
_NO_FILE_NAME = re.compile(r"[^\w.\[\]=+-]+")


@dataclass(frozen=True)
class Marking:
    """A checked marker. ``ranks`` are those it names; ``is_swept`` says that it names them as a list.

    ``trace`` is None for the default place. ``world_size`` is None where the trace is to say it, ``payload``
    ``"all"`` or ``"R,R,..."``: the ranks whose values a recording keeps. ``cpu``: record with the CPU
    stand-in for CUDA.
    """

    trace: str | None
    ranks: tuple[int, ...]
    is_swept: bool
    world_size: int | None
    payload: str
    cpu: bool


def marking_of(node: pytest.Item | pytest.Collector) -> Marking | None:
    """What the closest ``ranklens`` marker says; None without one. A wrong argument fails, named."""
    mark = node.get_closest_marker("ranklens")
    return None if mark is None else _checked(mark, node.nodeid)


def refuse_what_is_no_function(item: pytest.Item) -> pytest.Function:
    """The item, if it is one whose body can be run on its own; else fails."""
    if not isinstance(item, pytest.Function) or (item.cls and issubclass(item.cls, unittest.TestCase)):
        fail(
            f"@pytest.mark.ranklens is for test functions and methods of plain classes, and {item.nodeid} is "
            f"a {type(item).__name__}. Write it as one of those."
        )
    return item


def rank_of(item: pytest.Function, marking: Marking) -> int:
    """The rank that this item is."""
    if marking.is_swept:
        return cast(int, item.callspec.params[RANK_PARAMETER])
    return marking.ranks[0]


def trace_path(item: pytest.Function, marking: Marking) -> Path:
    """Where the test's trace lies: relative to the test's file."""
    folder = item.path.parent
    if marking.trace is not None:
        return folder / marking.trace
    classes = [node.name for node in item.listchain() if isinstance(node, pytest.Class)]
    name = ".".join([*classes, _without_rank(item.name, item, marking)])
    return folder / TRACES / item.path.stem / _NO_FILE_NAME.sub("-", name)


def test_name(item: pytest.Function, marking: Marking) -> str:
    """The test as a person would name it to pytest where this one was started; one name for all its ranks."""
    invoked_in = item.config.invocation_params.dir
    file = os.path.relpath(item.path, invoked_in)
    if file.startswith(os.pardir):
        file = str(item.path)
    _, _, within = item.nodeid.partition("::")
    return f"{file}::{_without_rank(within, item, marking)}"


def record_command(item: pytest.Function, marking: Marking) -> str:
    """The command that records the test's trace anew."""
    return f"pytest {shlex.quote(test_name(item, marking))} --ranklens-record"


def shown(path: Path, item: pytest.Function) -> str:
    """``path`` from where pytest was started, if that is shorter."""
    relative = os.path.relpath(path, item.config.invocation_params.dir)
    return str(path) if relative.startswith(os.pardir) else relative


def _without_rank(name: str, item: pytest.Function, marking: Marking) -> str:
    """A test's name without the rank that was appended to its parameters."""
    if not marking.is_swept:
        return name
    suffix = f"rank{rank_of(item, marking)}]"
    alone = f"[{suffix}"
    return name.removesuffix(alone) if name.endswith(alone) else name.removesuffix(f"-{suffix}") + "]"


def _checked(mark: pytest.Mark, nodeid: str) -> Marking:
    def wrong(problem: str) -> NoReturn:
        fail(f"{nodeid}: @pytest.mark.ranklens: {problem} Its arguments: {SIGNATURE}")

    values: dict[str, Any] = dict(mark.kwargs)
    for key in values:
        if key not in _KEYS:
            wrong(f"there is no argument {key!r}.")
    if len(mark.args) > 1:
        wrong(f"{len(mark.args)} arguments without a name, where only the trace goes without.")
    if mark.args:
        if "trace" in values:
            wrong("the trace is there twice.")
        values["trace"] = mark.args[0]
    trace = values.get("trace")
    if trace is not None and not (isinstance(trace, str | os.PathLike) and os.fspath(trace)):
        wrong(f"trace is {trace!r}, not the path of a directory.")
    if "rank" not in values:
        wrong(
            "rank is missing: the rank that the test is to be, as in rank=5, or several, as in rank=[0, 5]."
        )
    rank = values["rank"]
    is_swept = isinstance(rank, list | tuple | range)
    ranks = tuple(rank) if is_swept else (rank,)
    if not ranks or len(set(ranks)) != len(ranks) or not all(_is_count(one, least=0) for one in ranks):
        wrong(f"rank is {rank!r}, not a rank (0 or more) or a list of different ones.")
    world_size = values.get("world_size")
    if world_size is not None and not _is_count(world_size, least=1):
        wrong(f"world_size is {world_size!r}, not a number of ranks (1 or more).")
    if world_size is not None and max(ranks) >= world_size:
        wrong(f"rank is {rank!r}, outside a world of {world_size} (0 to {world_size - 1}).")
    cpu = values.get("cpu", False)
    if not isinstance(cpu, bool):
        wrong(f"cpu is {cpu!r}, not True or False.")
    payload = values.get("payload", "all")
    if payload != "all":
        if not isinstance(payload, list | tuple) or not all(_is_count(one, least=0) for one in payload):
            wrong(f"payload is {payload!r}, not 'all' or a list of the ranks whose values are kept.")
        if set(ranks) - set(payload):
            wrong(
                f"payload is {payload!r}: without the values of rank {min(set(ranks) - set(payload))} that "
                "rank cannot be replayed."
            )
        payload = ",".join(map(str, payload))
    return Marking(
        trace=None if trace is None else os.fspath(trace),
        ranks=ranks,
        is_swept=is_swept,
        world_size=world_size,
        payload=payload,
        cpu=cpu,
    )


def _is_count(value: object, *, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
