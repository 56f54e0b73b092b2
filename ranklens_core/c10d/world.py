"""A world of one process that looks like the whole job.

``init_process_group`` and ``new_group`` make torch's own ``fake`` groups, with the ranks, names and
backend names of the real job; nothing connects to anybody. The store answers from this rank alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
import torch.testing._internal.distributed.fake_pg  # noqa: F401 registers the fake backend
from torch._C._distributed_c10d import FakeProcessGroup, ProcessGroup

from ranklens_core.errors import UnsupportedError, UsageError
from ranklens_core.patches import Patches

DEFAULT_TIMEOUT = timedelta(minutes=30)
"""What a Store reports before anybody sets it (torch's default for process groups)."""


class OneRankStore(dist.Store):
    """A key-value store that holds what this rank has set; its peers set nothing.

    Somebody in Python must hold it: once Python drops it, its C++ half knows no method any more.
    """

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()
        self._values: dict[str, bytes] = {}
        self._timeout = DEFAULT_TIMEOUT

    def set(self, key: str, value: str | bytes) -> None:
        self._values[key] = value if isinstance(value, bytes) else value.encode()

    def get(self, key: str) -> bytes:
        self._need([key])
        return self._values[key]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._need(keys)

    def add(self, key: str, amount: int) -> int:
        total = int(self._values.get(key, b"0")) + amount
        self._values[key] = str(total).encode()
        return total

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        wanted = expected if isinstance(expected, bytes) else expected.encode()
        if self._values.get(key, b"") == wanted:
            self.set(key, desired)
        return self._values.get(key, wanted)

    def check(self, keys: list[str]) -> bool:
        return all(key in self._values for key in keys)

    def delete_key(self, key: str) -> bool:
        return self._values.pop(key, None) is not None

    def num_keys(self) -> int:
        return len(self._values)

    def append(self, key: str, value: str | bytes) -> None:
        self._values[key] = self._values.get(key, b"") + (
            value if isinstance(value, bytes) else value.encode()
        )

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def multi_set(self, keys: list[str], values: list[str | bytes]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def has_extended_api(self) -> bool:
        return True

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout

    @property
    def timeout(self) -> timedelta:
        return self._timeout

    def clone(self) -> OneRankStore:
        return self

    def _need(self, keys: list[str]) -> None:
        missing = [key for key in keys if key not in self._values]
        if missing:
            raise UnsupportedError(
                f"The program waits for the store key {missing[0]!r}, which only a peer would set: "
                "in a replay there are no peers, and values passed through a Store are not recorded. "
                "Pass them through a collective (broadcast_object_list) instead."
            )


class OneRankWorld:
    """Patches process-group creation while installed; ``rank`` of ``world_size`` is this process."""

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank = rank
        self._world_size = world_size
        self._patches = Patches()
        self._stores: list[OneRankStore] = []
        if dist.is_initialized():
            raise UsageError(
                "torch.distributed is initialised already: a replay must begin before the program's "
                "init_process_group."
            )
        patch = self._patches.set
        patch(c10d, "_new_process_group_helper", self._fake_helper(c10d._new_process_group_helper))
        patch(c10d, "rendezvous", self._rendezvous)
        patch(c10d, "_store_based_barrier", lambda *_, **__: None)
        # TORCH_DISTRIBUTED_DEBUG=DETAIL wraps every group in one that asks the peers: torch's own name
        # for the level, which the program reads, stays
        patch(c10d, "get_debug_level", lambda: dist.DebugLevel.OFF)
        patch(c10d, "_set_pg_timeout", lambda *_, **__: None)
        for module in (dist, c10d):
            patch(module, "split_group", self._split_group)
        # the classes, not only the names: isinstance must go on working
        for name in ("TCPStore", "FileStore"):
            patch(dist, name, type(name, (OneRankStore,), {"__init__": self._store_init()}))

    def remove(self) -> None:
        """Give torch its own group creation back. Idempotent."""
        self._patches.undo()

    def _rendezvous(self, *_: Any, **__: Any) -> Iterator[tuple[dist.Store, int, int]]:
        store = OneRankStore()
        self._stores.append(store)
        yield store, self._rank, self._world_size

    def _store_init(self) -> Callable[..., None]:
        """The ``__init__`` of a store that the program makes, and may drop."""

        def init(store: OneRankStore, *_: Any, **__: Any) -> None:
            OneRankStore.__init__(store)
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
            fake = ",".join(f"{device}:fake" for device in devices)
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


def let_fake_groups_coalesce(patches: Patches, backend: str) -> None:
    """Make ``batch_isend_irecv`` take the path it takes with the real backend."""
    if coalesces(backend):
        patches.set(FakeProcessGroup, "supports_coalescing", property(lambda _: True))
        # the batch exists in the replayer alone; torch's fake group refuses to batch
        patches.set(ProcessGroup, "_start_coalescing", lambda *_: None)
        patches.set(ProcessGroup, "_end_coalescing", lambda *_: None)


__all__ = ["OneRankStore", "OneRankWorld", "let_fake_groups_coalesce"]
