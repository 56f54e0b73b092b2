"""PYTHONHASHSEED: the order of sets of strings is part of a run, and so of what follows from it.

Python draws a seed as it starts unless this variable gives one, and never tells which it drew. So a
recording starts over with a seed that it knows, and a replay with the recorded one.
"""

from __future__ import annotations

import os
import secrets
import sys

from ranklens_core.own_command import started_as

VARIABLE = "PYTHONHASHSEED"
MAX_SEED = (1 << 32) - 1  # Python/bootstrap_hash.c


def fix_hash_seed(recorded: str | None = None) -> None:
    """Go on in a python with the ``recorded`` seed, or without one with any that is known.

    Does not return where that takes a new python; in the new one it returns. Does nothing where this
    process is not the RankLens command (a debugger or a test runs it), or for what is no seed: then the
    verdict reports the difference.
    """
    now = os.environ.get(VARIABLE, "random")
    if now == recorded or (recorded is None and now != "random") or not _is_own_command():
        return
    seed = str(secrets.randbelow(MAX_SEED + 1)) if recorded is None else recorded
    if seed.isascii() and seed.isdigit() and int(seed) <= MAX_SEED:
        os.environ[VARIABLE] = seed
        os.execv(sys.executable, sys.orig_argv)


def _is_own_command() -> bool:
    """Whether python was started as ``python [-OPTIONS] -m ranklens_core ...``, ``ranklens ...`` or a
    front door."""
    if sys.flags.ignore_environment:
        return False
    started = started_as()
    return started is not None and started.is_ranklens
