"""The command line: one module a verb, loaded when it is used (``--help`` imports no torch)."""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Sequence
from typing import Any

import click

from ranklens_core.errors import RankLensError
from ranklens_core.text import printable

VERBS = {
    "record": "Record a distributed job: every rank's calls, and results of chosen ranks.",
    "replay": "Run one rank of a recorded job alone.",
    "emulate": "Run one rank of a job that was never recorded.",
    "run": "Record a target once and replay its ranks: targets, tasks and what-ifs by name (Hydra).",
    "info": "Say what a trace holds.",
    "verify": "Check that a trace is whole and undamaged.",
    "diagnose": "Say what went wrong in a job that hung or broke, and which rank began it.",
    "demo": "Record an 8-rank job on this machine and replay one rank of it.",
    "doctor": "Say what works on this machine, and what to do about what does not.",
}
"""Verb -> its line in the help; ``ranklens_core.cli.<verb>`` holds its ``command``."""


class _Verbs(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in VERBS:
            return None
        command: click.Command = importlib.import_module(f"ranklens_core.cli.{cmd_name}").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        # click would import every verb to read its help
        with formatter.section("Commands"):
            formatter.write_dl(list(VERBS.items()))

    def main(self, args: Sequence[str] | None = None, *rest: Any, **more: Any) -> Any:
        """Run; a ``RankLensError`` becomes one message and its exit status."""
        try:
            return super().main(_local_rank_moved(sys.argv[1:] if args is None else args), *rest, **more)
        except RankLensError as error:
            click.echo(f"ranklens: {printable(str(error))}", err=True)
            sys.exit(error.exit_status)


def _local_rank_moved(args: Sequence[str]) -> list[str]:
    """``--local_rank=N VERB ... -- PROGRAM``, as DeepSpeed's launcher starts it: it is for the program."""
    if not args or not args[0].startswith("--local_rank=") or "--" not in args:
        return list(args)
    from ranklens_core.cli.door import move_local_rank

    end = args.index("--") + 1
    return [*args[1:end], *move_local_rank([args[0], *args[end:]])]


@click.group(cls=_Verbs, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="ranklens", prog_name="ranklens")
def main() -> None:
    """Run one rank of a distributed training job alone, in the job's own world.

    Record once on the real job, then replay any rank on one device or none:

    \b
      ranklens record --nproc 8 --out trace -- train.py
      ranklens replay trace --rank 5 -- train.py

    Exit status: 0 good; 2 usage; 3 structure mismatch; 4 values diverged; 5 trace unusable;
    6 communication RankLens cannot stand in for; else the program's own.
    """
    prepare_process()


def prepare_process() -> None:
    """What every command begins with: its standard streams and RankLens' own logger."""
    _open_closed_streams()
    # our own logger alone: the root logger is the program's to configure
    logger = logging.getLogger("ranklens")
    if not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("ranklens: %(message)s"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False


def _open_closed_streams() -> None:
    """Give a command that was started with stdin, stdout or stderr closed (``>&-``) an empty one: the
    next pipe would get its number, and what is meant for the pipe would be taken for output."""
    for fd, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(fd)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest free number: fd
        if getattr(sys, name) is None:
            stream = open(fd, mode, closefd=False)  # noqa: SIM115 as long as the process
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)
