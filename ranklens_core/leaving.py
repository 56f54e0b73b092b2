"""``os._exit`` leaves past every ``finally`` and ``atexit``: a word before it goes.

Training programs end that way to skip a communication library's own, sometimes endless, end.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import NoReturn

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
