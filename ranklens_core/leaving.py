"""``os._exit`` and ``os.exec*`` leave past every ``finally`` and ``atexit``: a word before they go.

Training programs end by ``os._exit`` to skip a communication library's own, sometimes endless, end; they
replace themselves by ``os.exec*`` to start over with other variables, and are then out of RankLens's hands.
"""

from __future__ import annotations

import os
import posix
from collections.abc import Callable
from typing import Any, NoReturn

from ranklens_core.patches import Patches


def before_exit(patches: Patches, last: Callable[[int], int]) -> None:
    """Have ``os._exit(status)`` call ``last(status)`` first and leave with the status that this returns.

    Only in this process: children that the program forks (and that all end by ``os._exit``) are not
    RankLens's to speak for.
    """
    pid, leave = os.getpid(), os._exit

    def exit_with_a_word(status: int) -> NoReturn:
        try:
            if os.getpid() == pid:
                status = last(status)
        finally:
            leave(status)

    patches.set(os, "_exit", exit_with_a_word)


def before_exec(patches: Patches, last: Callable[[str], None]) -> None:
    """Have ``os.execv`` and its kin call ``last("os.execv(PATH)")`` first, where they will succeed.

    What ``last`` raises keeps the program here. Only in this process: what forked children do is theirs.
    """
    pid = os.getpid()

    def watched(name: str) -> Callable[..., NoReturn]:
        execute: Callable[..., NoReturn] = getattr(os, name)

        def exec_with_a_word(path: Any, *arguments: Any) -> NoReturn:
            # os.execvp tries one directory after the other: what cannot be executed returns with an error
            if os.getpid() == pid and _is_executable(path):
                last(f"os.{name}({os.fsdecode(path) if not isinstance(path, int) else path})")
            execute(path, *arguments)

        return exec_with_a_word

    # every os.exec* is one of these two
    for name in ("execv", "execve"):
        function = watched(name)
        for module in (os, posix):
            patches.set(module, name, function)


def _is_executable(path: Any) -> bool:
    return isinstance(path, int) or (os.path.isfile(path) and os.access(path, os.X_OK))
