"""Whether this process is being recorded, replayed or emulated: what a front door asks before it acts."""

from __future__ import annotations

import sys

from ranklens_core.patches import Patches

is_active = False
"""Set while a session lives, by ``mark_active`` alone."""


def mark_active(patches: Patches) -> None:
    """A session begins; undoing ``patches`` ends it."""
    patches.set(sys.modules[__name__], "is_active", True)
