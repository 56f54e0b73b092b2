"""The Store of a world of one: it answers from what this rank has set."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ranklens_core.c10d.patience import Patience
from ranklens_core.errors import UnsupportedError

DEFAULT_TIMEOUT = timedelta(minutes=30)
"""What a Store reports before anybody sets it (torch's default for process groups)."""

_COUNT, _LAST = "/num_members", "/last_member"
"""Keys of torch's own barriers by Store (``Store.barrier``, ``torch.distributed.elastic.utils.store``): each
member adds to the count, the last one sets the mark that all wait for."""


class OneRankStore(dist.Store):
    """A key-value store that holds what this rank has set; its peers set nothing.

    A key that is not there is an ``UnsupportedError``, for nobody will set it. torch's barriers by Store
    carry no values and are passed at once. Polling is left to ``Patience``.

    Somebody in Python must hold it: once Python drops it, its C++ half knows no method any more.
    """

    def __init__(self, *_: Any, patience: Patience | None = None, **__: Any) -> None:
        super().__init__()
        self._values: dict[str, bytes] = {}
        self._queues: dict[str, list[bytes]] = {}
        self._timeout = DEFAULT_TIMEOUT
        self._patience = patience or Patience()

    def set(self, key: str, value: str | bytes) -> None:
        self._values[key] = _bytes(value)

    def get(self, key: str) -> bytes:
        self._need([key])
        value = self._values.get(key, b"")  # a barrier's mark has no value
        self._patience.asked(f"get({key!r})", value[:80])
        return value

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._need(keys)

    def barrier(self, key: str, world_size: int, timeout: timedelta | None = None) -> None:
        self.add(f"{key}{_COUNT}", 1)

    def add(self, key: str, amount: int) -> int:
        total = int(self._values.get(key, b"0")) + amount
        if amount == 0:
            self._patience.asked(f"add({key!r}, 0)", total)
        self._values[key] = str(total).encode()
        return total

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        wanted = _bytes(expected)
        if self._values.get(key, b"") == wanted:
            self.set(key, desired)
            return self._values[key]
        found = self._values.get(key, wanted)
        self._patience.asked(f"compare_set({key!r}, {wanted[:80]!r}, ...)", found[:80])
        return found

    def check(self, keys: list[str]) -> bool:
        found = all(self._has(key) for key in keys)
        self._patience.asked(f"check({list(keys)!r})", found)
        return found

    def delete_key(self, key: str) -> bool:
        found = self._values.pop(key, None) is not None
        if not found:
            self._patience.asked(f"delete_key({key!r})", found)
        return found

    def num_keys(self) -> int:
        self._patience.asked("num_keys()", len(self._values))
        return len(self._values)

    def list_keys(self) -> list[str]:
        self._patience.asked("list_keys()", len(self._values))
        return list(self._values)

    def append(self, key: str, value: str | bytes) -> None:
        self._values[key] = self._values.get(key, b"") + _bytes(value)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def multi_set(self, keys: list[str], values: list[str | bytes]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def queue_push(self, key: str, value: str | bytes) -> None:
        self._queues.setdefault(key, []).append(_bytes(value))

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        queue = self._queues.get(key)
        if queue:
            value = queue.pop(0)
            if not queue:
                del self._queues[key]
            return value
        if block:
            self._need([key])
        self._patience.asked(f"queue_pop({key!r}, False)", "nothing")
        raise dist.QueueEmptyError("queue is empty")

    def queue_len(self, key: str) -> int:
        length = len(self._queues.get(key, ()))
        self._patience.asked(f"queue_len({key!r})", length)
        return length

    def has_extended_api(self) -> bool:
        return True

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout

    @property
    def timeout(self) -> timedelta:
        return self._timeout

    def clone(self) -> OneRankStore:
        return self

    # what torch's C++ (a PrefixStore around this one) calls them
    getNumKeys = num_keys
    deleteKey = delete_key

    def _has(self, key: str) -> bool:
        is_passed_barrier = key.endswith(_LAST) and f"{key.removesuffix(_LAST)}{_COUNT}" in self._values
        return key in self._values or key in self._queues or is_passed_barrier

    def _need(self, keys: Sequence[str]) -> None:
        missing = [key for key in keys if not self._has(key)]
        if not missing:
            return
        self._patience.asked(f"wait({missing!r})", "nothing")
        site = self._patience.site
        raise UnsupportedError(
            f"The program{f' (at {site})' if site else ''} waits for the store key {missing[0]!r}, which "
            "only a peer would set: in a replay there are no peers, and values passed through a Store are "
            "not recorded. Pass them through a collective (broadcast_object_list) instead."
        )


def _bytes(value: str | bytes) -> bytes:
    return value if isinstance(value, bytes) else value.encode()
