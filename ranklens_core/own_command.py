"""How python was started, from ``sys.orig_argv``: its options, the program and the program's arguments."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass

COMMANDS = ("ranklens_core", "ranklens_deepspeed", "ranklens_megatron")
"""Packages that run a program when python is started with ``-m PACKAGE``."""


@dataclass(frozen=True)
class StartedAs:
    """``python OPTIONS PROGRAM ARGS``; ``program`` is ``("FILE",)`` or ``("-m", "MODULE")``."""

    options: tuple[str, ...]
    program: tuple[str, ...]
    args: tuple[str, ...]

    @property
    def is_ranklens(self) -> bool:
        """Whether the program is RankLens' own command, which runs the user's program."""
        if self.program[0] == "-m":
            return self.program[1] in COMMANDS
        return os.path.basename(self.program[0]) == "ranklens"


def started_as() -> StartedAs | None:
    """How this python was started; None where that is no program with arguments (``-c``, a prompt), or
    where ``sys.argv`` is not what python made of it any more."""
    own = len(sys.orig_argv) - len(sys.argv) + 1
    head, args = sys.orig_argv[1:own], sys.orig_argv[own:]
    if args != sys.argv[1:] or not head or sys.argv[0] == "-c":
        return None
    program = tuple(head[-2:] if head[-2:-1] == ["-m"] else head[-1:])
    options = tuple(head[: -len(program)])
    if any(not option.startswith("-") or option == "-m" for option in options):
        return None  # an option with a value of its own: what follows it cannot be told
    if program[0] != "-m" and program[0].startswith("-"):
        return None
    return StartedAs(options, program, tuple(args))
