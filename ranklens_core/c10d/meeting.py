"""An id that the ranks of one job agree on, and no other job has.

What a launcher sets (job id, address, port) is the same for two jobs after one another, and ranks of both
could be taken for one run. So the ranks meet where they meet anyway: in the Store of ``init_process_group``.
Whoever is first leaves an id there, the others find it; nobody waits for anybody.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from ranklens_core.patches import Patches

log = logging.getLogger("ranklens")

KEY = "ranklens/meeting"


class Meeting:
    """Tells ``on_met`` the job's id when the program makes its first process group, or now if it has."""

    def __init__(self, on_met: Callable[[str], None]) -> None:
        self._on_met = on_met
        self._is_over = False
        self._patches = Patches()
        helper = c10d._new_process_group_helper

        def patched(
            group_size: Any, group_rank: Any, ranks: Any, backend: Any, store: Any, *rest: Any, **more: Any
        ) -> Any:
            # here nobody else uses the store yet: a thread that waits in it would hold it
            self._meet(store)
            return helper(group_size, group_rank, ranks, backend, store, *rest, **more)

        if dist.is_initialized():
            self._meet(c10d._get_default_store())
        else:
            self._patches.set(c10d, "_new_process_group_helper", patched)

    def _meet(self, store: dist.Store) -> None:
        if self._is_over:
            return
        self._is_over = True
        try:
            # an empty expectation stands for a key that is not there
            found = store.compare_set(KEY, "", secrets.token_hex(8))
            self._on_met(found.decode())
        except Exception as error:  # a store of the program's own, or none (MPI): the training must go on
            log.info("the ranks have no store to agree on the run's id in: %s", error)

    def remove(self) -> None:
        """Watch no longer. Idempotent."""
        self._patches.undo()
