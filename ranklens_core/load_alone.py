"""Loading a distributed checkpoint where there are no peers to plan it with."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from ranklens_core.import_hook import ImportHook
from ranklens_core.patches import Patches

LOADER = "torch.distributed.checkpoint.state_dict_loader"
"""Where every load of ``torch.distributed.checkpoint`` ends: ``_load_state_dict(..., no_dist=, ...)``."""


def load_alone(patches: Patches) -> None:
    """Let ``torch.distributed.checkpoint`` load as with ``no_dist=True`` until ``patches`` are undone.

    Each rank reads what it needs from the checkpoint's files either way; with peers rank 0 plans for all,
    which here nobody would send.
    """

    def patch() -> None:
        module = sys.modules[LOADER]
        patches.set(module, "_load_state_dict", _without_peers(vars(module)["_load_state_dict"]))

    patches.on_undo(ImportHook({LOADER: patch}).remove)


def _without_peers(load: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(load)
    def patched(
        state_dict: Any,
        storage_reader: Any,
        process_group: Any = None,
        coordinator_rank: int = 0,
        no_dist: bool = False,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        return load(state_dict, storage_reader, None, 0, True, *args, **kwargs)

    return patched
