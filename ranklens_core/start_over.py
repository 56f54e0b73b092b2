"""Starting the running program over under RankLens, in the same process, before it has communicated."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

from ranklens_core.errors import UsageError
from ranklens_core.own_command import started_as


def start_over(package: str) -> NoReturn:
    """Go on as ``python -m PACKAGE PROGRAM ARGS`` where this process is ``python PROGRAM ARGS``.

    The process keeps its id, environment and standard streams, so its launcher notices nothing. What the
    program has done until now is done again.

    Raises:
        UsageError: this process is no plain program (a prompt, a test runner).
    """
    started = started_as()
    if started is None or started.is_ranklens:
        raise UsageError(
            f"RankLens cannot start this program over from inside ({' '.join(sys.orig_argv)}). Start it as "
            f"`python -m {package} PROGRAM ARGS`."
        )
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and not stream.closed:
            stream.flush()
    command = (sys.executable, *started.options, "-m", package, *started.program, *started.args)
    os.execv(sys.executable, command)
