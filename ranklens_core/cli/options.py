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
