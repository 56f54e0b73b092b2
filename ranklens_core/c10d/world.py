"""A world of one process that looks like the whole job.

``init_process_group`` and ``new_group`` make torch's own ``fake`` groups, with the ranks, names and
backend names of the real job; nothing connects to anybody. The store answers from this rank alone.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
import torch.testing._internal.distributed.fake_pg
from torch._C._distributed_c10d import FakeProcessGroup, ProcessGroup

from ranklens_core.c10d.patience import Patience
from ranklens_core.c10d.store import OneRankStore
from ranklens_core.errors import UsageError
from ranklens_core.patches import Patches


class OneRankWorld:
    """Patches process-group creation while installed; ``rank`` of ``world_size`` is this process.

    ``patience`` watches the program's questions to its Stores.
    """

    def __init__(self, rank: int, world_size: int, patience: Patience | None = None) -> None:
        self._rank = rank
        self._world_size = world_size
        self._patience = patience or Patience()
        self._patches = Patches()
        self._stores: list[OneRankStore] = []
        if dist.is_initialized():
            raise UsageError(
                "torch.distributed is initialised already: a replay must begin before the program's "
                "init_process_group."
            )
        patch = self._patches.set
        patch(c10d, "_new_process_group_helper", self._fake_helper(c10d._new_process_group_helper))
        patch(c10d, "_store_based_barrier", lambda *_, **__: None)
        # TORCH_DISTRIBUTED_DEBUG=DETAIL wraps every group in one that asks the peers: torch's own name
        # for the level, which the program reads, stays
        patch(c10d, "get_debug_level", lambda: dist.DebugLevel.OFF)
        patch(c10d, "_set_pg_timeout", lambda *_, **__: None)
        for module in (dist, c10d):
            patch(module, "split_group", self._split_group)
        # dist.rendezvous is the function: the module of that name is found elsewhere
        rendezvous = sys.modules["torch.distributed.rendezvous"]
        for module in (dist, c10d, rendezvous):
            patch(module, "rendezvous", self._rendezvous)
        # the classes, not only the names: isinstance must go on working
        for name in ("TCPStore", "FileStore"):
            store_class = type(name, (OneRankStore,), {"__init__": self._store_init()})
            for module in (dist, rendezvous):
                patch(module, name, store_class)

    def remove(self) -> None:
        """Give torch its own group creation back. Idempotent."""
        self._patches.undo()

    def _rendezvous(self, *_: Any, **__: Any) -> Iterator[tuple[dist.Store, int, int]]:
        store = OneRankStore(patience=self._patience)
        self._stores.append(store)
        yield store, self._rank, self._world_size

    def _store_init(self) -> Callable[..., None]:
        """The ``__init__`` of a store that the program makes, and may drop."""

        def init(store: OneRankStore, *_: Any, **__: Any) -> None:
            OneRankStore.__init__(store, patience=self._patience)
            self._stores.append(store)

        return init

    def _fake_helper(self, helper: Any) -> Any:
        def make(
            group_size: int,
            group_rank: int,
            global_ranks: list[int],
            backend: Any,
            store: Any,
            *args: Any,
            **kwargs: Any,
        ) -> Any:
            if not global_ranks and (group_rank, group_size) != (self._rank, self._world_size):
                raise UsageError(
                    f"The program calls init_process_group(rank={group_rank}, "
                    f"world_size={group_size}), but this run is rank {self._rank} of "
                    f"{self._world_size}. Let the program read RANK and WORLD_SIZE, or choose the "
                    "trace or rank that fits."
                )
            # options are for the real backend; torch keeps nothing of them that a program can read
            kwargs.update({"backend_options": None} if "backend_options" in kwargs else {})
            devices = c10d.BackendConfig(c10d.Backend(backend)).get_device_backend_map()
            # an nccl program's tensors are the CPU's where there is no GPU
            on_cpu = () if "cpu" in devices or _has_gpu() else ("cpu",)
            fake = ",".join(f"{device}:fake" for device in (*devices, *on_cpu))
            pg, pg_store = helper(group_size, group_rank, global_ranks, fake, store, *args, **kwargs)
            if pg is not c10d.GroupMember.NON_GROUP_MEMBER:
                # torch guesses the default from the backends' names and finds no gloo or nccl there
                pg._set_default_backend(ProcessGroup.BackendType.CUSTOM)
                world = c10d._world
                world.pg_map[pg] = (c10d.Backend(backend), world.pg_map[pg][1])
                world.pg_backend_config[pg] = str(c10d.BackendConfig(c10d.Backend(backend)))
            return pg, pg_store

        return make

    def _split_group(
        self,
        parent_pg: ProcessGroup | None = None,
        split_ranks: list[list[int]] | None = None,
        timeout: timedelta | None = None,
        pg_options: Any = None,
        group_desc: str | None = None,
        **_: Any,
    ) -> ProcessGroup | None:
        """What splitting a communicator gives: the one part that holds this rank."""
        if not split_ranks:
            raise ValueError("split_ranks cannot be None or empty")
        if c10d._get_default_group().bound_device_id is None:
            # torch's own words and condition: a program may have been refused, and have coped
            raise RuntimeError(
                "No device associated with the default pg, not safe to split any process groups"
            )
        parent = parent_pg or c10d._get_default_group()
        parents = c10d.get_process_group_ranks(parent)
        mine = [part for part in split_ranks if self._rank in [parents[rank] for rank in part]]
        if not mine:
            return None
        ranks = sorted(parents[rank] for rank in mine[0])
        group: ProcessGroup | None = dist.new_group(
            ranks,
            timeout=timeout,
            backend=str(dist.get_backend(parent_pg)),
            use_local_synchronization=True,
            group_desc=group_desc or f"{parent.group_desc}:split",
        )
        return group


def coalesces(backend: str) -> bool:
    """Whether the real backend batches calls between ``_start_coalescing`` and ``_end_coalescing``."""
    return "nccl" in backend


def _has_gpu() -> bool:
    """Whether there is a real one: ``torch.cuda`` may be the CPU stand-in."""
    count = getattr(torch._C, "_cuda_getDeviceCount", None)
    return count is not None and count() > 0


def let_fake_groups_coalesce(patches: Patches, backend: str | None) -> None:
    """Make ``batch_isend_irecv`` take the path it takes with the real backend; None: with the one that
    the program asks for."""
    if backend is not None and not coalesces(backend):
        return

    def supports(_: FakeProcessGroup) -> bool:
        # a backend does not know its group; one kind of network carries the whole job
        return backend is not None or any(coalesces(str(made)) for made, _ in c10d._world.pg_map.values())

    patches.set(FakeProcessGroup, "supports_coalescing", property(supports))
    # the batch exists in the replayer alone; torch's fake group refuses to batch
    patches.set(ProcessGroup, "_start_coalescing", lambda *_: None)
    patches.set(ProcessGroup, "_end_coalescing", lambda *_: None)


__all__ = ["OneRankWorld", "let_fake_groups_coalesce"]
