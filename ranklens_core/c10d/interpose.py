"""Put a handler in the place of every c10d kernel, and take it away again.

Every caller of a collective passes through the dispatcher: ``torch.distributed``, the DDP
reducer, functional collectives, DTensor and FSDP2. So one kernel per operator and device, all
leading to the same ``Handler.handle``, sees every call. Real process groups stay untouched.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch._C._distributed_c10d import ProcessGroup, Work
from torch.library import Library, get_kernel

from ranklens_core.c10d.call import Call, Handler, Proceed
from ranklens_core.c10d.ops import Operator, Returns, operators
from ranklens_core.errors import UsageError
from ranklens_core.patches import Patches

DISPATCH_KEYS = ("CPU", "CUDA", "SparseCPU", "SparseCUDA", "PrivateUse1")
"""Keys with c10d kernels that communicate; ``Meta`` kernels do not."""

_installed: Interposer | None = None


class Interposer:
    """The installed kernels and patched methods; ``remove()`` leaves torch as it was."""

    def __init__(self, handler: Handler) -> None:
        self._library: Library | None = Library("c10d", "IMPL")  # noqa: TOR901 removed in remove()
        self._patches = Patches()
        with warnings.catch_warnings():
            # torch warns that a kernel is overridden, which is what is asked for here
            warnings.filterwarnings("ignore", "(?s).*Overriding a previously registered kernel.*")
            for operator in operators():
                for key in DISPATCH_KEYS:
                    if torch._C._dispatch_has_kernel_for_dispatch_key(f"c10d::{operator.name}", key):
                        self._override(operator, key, handler)
        self._patch_methods(handler)

    def _override(self, operator: Operator, key: str, handler: Handler) -> None:
        original = get_kernel(f"c10d::{operator.name}", key)  # type: ignore[arg-type]
        returns = operator.returns

        def kernel(keyset: Any, *args: Any) -> Any:
            def proceed() -> Work | None:
                result = original.call_boxed(keyset, *args)
                if returns is Returns.NOTHING:
                    return None
                return Work.unbox(result if returns is Returns.WORK else result[1])

            call = Call(operator, args)
            work = handler.handle(call, proceed)
            if returns is Returns.NOTHING:
                return None
            assert work is not None, f"the handler gave no Work for c10d::{operator.name}"
            boxed = work.boxed()
            return boxed if returns is Returns.WORK else (call.boxed_outputs, boxed)

        assert self._library is not None
        self._library.impl(operator.name, kernel, key, with_keyset=True, allow_override=True)

    def _patch_methods(self, handler: Handler) -> None:
        """Waits and coalescing batches are methods, not operators."""
        wait, start, end = Work.wait, ProcessGroup._start_coalescing, ProcessGroup._end_coalescing

        def patched_wait(self: Work, *args: Any, **kwargs: Any) -> Any:
            return handler.on_wait(self, lambda: wait(self, *args, **kwargs))

        def patched_start(self: ProcessGroup, device: torch.device) -> None:
            handler.start_batch(self)
            start(self, device)

        def patched_end(self: ProcessGroup, device: torch.device) -> Work | None:
            proceed: Proceed = lambda: end(self, device)  # noqa: E731
            return handler.end_batch(self, proceed)

        self._patches.set(Work, "wait", patched_wait)
        self._patches.set(ProcessGroup, "_start_coalescing", patched_start)
        self._patches.set(ProcessGroup, "_end_coalescing", patched_end)

    def remove(self) -> None:
        """Give every operator its own kernel back. Idempotent."""
        global _installed
        self._patches.undo()
        if self._library is not None:
            self._library._destroy()
            self._library = None
        if _installed is self:
            _installed = None


def install(handler: Handler) -> Interposer:
    """Send every c10d call of this process to ``handler`` until ``remove()``.

    Raises ``UnknownOperatorError`` for an operator that is not in the table, ``UsageError`` if
    another handler is installed.
    """
    global _installed
    if _installed is not None:
        raise UsageError(
            "RankLens already records or replays in this process: end that session before another begins."
        )
    _installed = Interposer(handler)
    return _installed


def is_installed() -> bool:
    """Whether a handler is in place."""
    return _installed is not None


__all__ = ["Call", "Callable", "Handler", "Interposer", "install", "is_installed"]
