"""Memory nobody has written to: where results are made up, ``torch.empty`` gives zeros.

A rank that is not the root hands a broadcast either its own values (parameters, which uniform peers
have too) or a fresh buffer. Its bytes alone do not tell which, and a fresh buffer's are not the same
in two runs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.utils._device
from torch.multiprocessing.reductions import StorageWeakRef

from ranklens_core.patches import Patches

MAKERS = (
    (torch, "empty"),
    (torch, "empty_like"),
    (torch, "empty_strided"),
    (torch.Tensor, "new_empty"),
    (torch.Tensor, "new_empty_strided"),
)
"""What a program makes fresh buffers with. (``torch.Tensor(n)`` is a type, which cannot be replaced.)"""


class Unwritten:
    """Makes fresh buffers zero until ``patches`` are undone, and knows which floating ones are still."""

    def __init__(self, patches: Patches) -> None:
        # torch keeps a set of its constructors from the first time it is asked: it must hold its own
        torch.utils._device._device_constructors()
        self._fresh: dict[int, StorageWeakRef] = {}
        self._prune_at = 1024
        self._active = True
        for owner, name in MAKERS:
            patches.set(owner, name, self._zeroing(getattr(owner, name)))
        patches.on_undo(self._stop)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` was made empty and nobody has written to it, or only zeros."""
        mark = self._fresh.get(tensor.untyped_storage()._cdata)
        return mark is not None and not mark.expired() and not tensor.detach().count_nonzero()

    def _stop(self) -> None:
        # modules imported meanwhile may have kept one of the replaced functions
        self._active = False
        self._fresh.clear()

    def _zeroing(self, make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        @functools.wraps(make)
        def made_zero(*args: Any, **kwargs: Any) -> torch.Tensor:
            tensor = make(*args, **kwargs)
            if self._active and not torch.compiler.is_compiling():
                self._clean(tensor)
            return tensor

        return made_zero

    def _clean(self, tensor: torch.Tensor) -> None:
        # fake and distributed tensors are made of others, which pass here by themselves
        if type(tensor) is not torch.Tensor or tensor.is_meta or tensor.layout is not torch.strided:
            return
        tensor.detach().zero_()
        if tensor.dtype.is_floating_point:
            storage = tensor.untyped_storage()
            self._fresh[storage._cdata] = StorageWeakRef(storage)
            if len(self._fresh) > self._prune_at:
                self._fresh = {key: mark for key, mark in self._fresh.items() if not mark.expired()}
                self._prune_at = max(1024, 2 * len(self._fresh))
