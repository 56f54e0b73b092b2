"""While pdb waits for its user, the replay's time stands still."""

from __future__ import annotations

import pdb
from collections.abc import Callable
from typing import Any

from ranklens_core.patches import Patches


def pause_at_prompts(patches: Patches, pause: Callable[[], None], resume: Callable[[], None]) -> None:
    """Call ``pause`` when a pdb session comes to its prompt, and ``resume`` when it leaves it.

    That is ``breakpoint()``, ``pdb.set_trace()``, post mortems, and debuggers made from ``pdb.Pdb`` (ipdb,
    pdb++). Lines that the user steps through take their own time, slowed down by Python's tracing.
    """
    interaction = pdb.Pdb.interaction

    def patched(self: pdb.Pdb, *args: Any, **kwargs: Any) -> Any:
        pause()
        try:
            return interaction(self, *args, **kwargs)
        finally:
            resume()

    patches.set(pdb.Pdb, "interaction", patched)
