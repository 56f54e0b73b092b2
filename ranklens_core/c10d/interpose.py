"""Put a handler in the place of every c10d kernel, and take it away again.

Every caller of a collective passes through the dispatcher: ``torch.distributed``, the DDP
reducer, functional collectives, DTensor and FSDP2. So one kernel per operator, all leading to the
same ``Handler.handle``, sees every call. Real process groups and their kernels stay untouched.

The kernels stand at the ``BackendSelect`` key, which is active for every call and lies above all
devices. Going on from there with ``redispatch`` releases the GIL, as torch's own bindings do.
Overriding the device kernels and calling the originals by ``call_boxed`` would keep the GIL, and
deadlock: gloo destroys finished calls (their Python tensors need the GIL) under the same lock that
a new call waits for.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import ProcessGroup, Work
from torch.library import Library

from ranklens_core.c10d.call import Call, Handler, Proceed
from ranklens_core.c10d.ops import Operator, Returns, operators
from ranklens_core.c10d.work import FINISHED, NO_TIMEOUT, boxed, wait_for
from ranklens_core.errors import UsageError
from ranklens_core.patches import Patches

_OURS = torch._C.DispatchKeySet(torch._C.DispatchKey.BackendSelect)

_installed: Interposer | None = None


class Interposer:
    """The installed kernels and patched methods; ``remove()`` leaves torch as it was."""

    def __init__(self, handler: Handler) -> None:
        known = operators()
        self._patches = Patches()
        collectives, functional = Library("c10d", "IMPL"), Library("_c10d_functional", "IMPL")
        self._libraries = [collectives, functional]
        for operator in known:
            collectives.impl(operator.name, _kernel(operator, handler), "BackendSelect", with_keyset=True)
        functional.impl("wait_tensor", _wait_kernel(handler), "BackendSelect", with_keyset=True)
        self._patch_methods(handler)

    def _patch_methods(self, handler: Handler) -> None:
        """Waits and coalescing batches are methods, not operators."""
        start, end = ProcessGroup._start_coalescing, ProcessGroup._end_coalescing

        def patched_wait(self: Work, timeout: timedelta = NO_TIMEOUT) -> bool:
            if self is FINISHED:
                return True
            return handler.on_wait(self, lambda: wait_for(self, timeout))

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
        while self._libraries:
            self._libraries.pop()._destroy()
        if _installed is self:
            _installed = None


def _kernel(operator: Operator, handler: Handler) -> Callable[..., Any]:
    overload = getattr(torch.ops.c10d, operator.name).default
    returns = operator.returns

    def kernel(keyset: Any, *args: Any) -> Any:
        def proceed() -> Work | None:
            result = overload.redispatch(keyset - _OURS, *args)
            if returns is Returns.NOTHING:
                return None
            return Work.unbox(result if returns is Returns.WORK else result[1])

        call = Call(operator, args)
        if call.device_type == "meta":
            # shapes alone, as in tracing: nothing is communicated
            return overload.redispatch(keyset - _OURS, *args)
        work = handler.handle(call, proceed)
        if returns is Returns.NOTHING:
            return None
        assert work is not None, f"the handler gave no Work for c10d::{operator.name}"
        handle = boxed(work)
        return handle if returns is Returns.WORK else (call.boxed_outputs, handle)

    return kernel


def _wait_kernel(handler: Handler) -> Callable[[Any, torch.Tensor], torch.Tensor]:
    overload = torch.ops._c10d_functional.wait_tensor.default

    def kernel(keyset: Any, tensor: torch.Tensor) -> torch.Tensor:
        def wait() -> torch.Tensor:
            waited: torch.Tensor = overload.redispatch(keyset - _OURS, tensor)
            return waited

        return handler.on_wait_tensor(tensor, wait)

    return kernel


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
