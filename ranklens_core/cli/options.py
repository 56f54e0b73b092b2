"""Options and arguments that several verbs share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from ranklens_core.errors import UsageError
from ranklens_core.settings import DEFAULT_TRACE, parse_window

F = TypeVar("F", bound=Callable[..., Any])

DEFAULT_OUT = DEFAULT_TRACE

program_argument = click.argument("program", nargs=-1, type=click.UNPROCESSED, metavar="-- PROGRAM [ARGS...]")

trace_argument = click.argument("trace", type=click.Path(path_type=Path), metavar="DIR")

verdict_option = click.option(
    "--verdict",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE.json",
    help="Write the verdict as JSON.",
)

cpu_option = click.option(
    "--cpu",
    is_flag=True,
    help="Run a CUDA-only program on the CPU (on by default for Megatron programs where there is no GPU).",
)


network_option = click.option(
    "--network",
    metavar="NAME|FILE",
    help="The network whose times are estimated: h100-ib400, loopback, ..., or a .yaml file.",
)

bandwidth_option = click.option(
    "--bandwidth",
    type=float,
    default=1.0,
    show_default=True,
    metavar="FACTOR",
    help="What if every link of the network had FACTOR times its bandwidth.",
)


def parse_steps(_: click.Context, __: click.Parameter, value: str | None) -> tuple[int, int | None] | None:
    """``A:B`` as (A, B), ``A:`` as (A, None)."""
    if value is None:
        return None
    try:
        return parse_window(value)
    except ValueError:
        raise UsageError(
            f"--steps takes A:B with 0 <= A < B (or A:), counted from 0, not {value!r}."
        ) from None


def parse_ranks(_: click.Context, __: click.Parameter, value: str | None) -> tuple[int, ...]:
    """``5,0`` as (5, 0); nothing as ()."""
    if value is None:
        return ()
    try:
        ranks = tuple(int(part) for part in value.split(","))
    except ValueError:
        ranks = (-1,)
    if min(ranks) < 0 or len(set(ranks)) != len(ranks):
        raise UsageError(f"--own-core takes different ranks like 5 or 0,5, not {value!r}.")
    return ranks
