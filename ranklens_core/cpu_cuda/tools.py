"""CUDA's tool interfaces: ranges and profiler marks go nowhere, graphs and memory pools say so."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from ranklens_core.errors import UsageError

_NOT_HERE = (
    "The CPU stand-in has no {what}: the program asked for torch.cuda.{name}. Switch that feature off in the "
    "program's arguments, or run on a GPU."
)
_UNSUPPORTED = {
    "CUDA graphs": ["CUDAGraph", "graph", "graph_pool_handle", "make_graphed_callables"],
    "CUDA memory pools": ["MemPool", "use_mem_pool", "CUDAPluggableAllocator", "change_current_allocator"],
    "CUDA memory snapshots": ["memory_snapshot", "_record_memory_history", "_dump_snapshot", "_snapshot"],
}


class Ranges:
    """``torch._C._nvtx``: accepts marks, numbers started ranges, and counts the depth as NVTX does."""

    def __init__(self) -> None:
        self._depth = 0
        self._ids = itertools.count(1)

    def rangePushA(self, message: str) -> int:
        self._depth += 1
        return self._depth - 1

    def rangePop(self) -> int:
        self._depth -= 1
        return self._depth

    def rangeStartA(self, message: str) -> int:
        return next(self._ids)

    def rangeEnd(self, range_id: int) -> None:
        pass

    def markA(self, message: str) -> None:
        pass


class Runtime:
    """``torch.cuda.cudart()``: the calls that programs make for a profiler."""

    def cudaProfilerStart(self) -> int:
        return 0

    def cudaProfilerStop(self) -> int:
        return 0


def _check_error(result: int) -> None:
    """``torch.cuda.check_error``: only `Runtime`'s results come here, and 0 is success."""
    if result != 0:
        raise UsageError(f"torch.cuda.check_error was given {result}, no result of the CPU stand-in.")


def _refuse(what: str, name: str) -> Callable[..., Any]:
    message = _NOT_HERE.format(what=what, name=name)

    class Refused:
        """A class, for programs name it in ``isinstance`` and annotations without using it."""

        def __init__(self, *args: object, **kwargs: object) -> None:
            raise UsageError(message)

    Refused.__name__ = Refused.__qualname__ = name
    return Refused


def replacements() -> dict[str, object]:
    """Stand-ins by their name in ``torch.cuda``."""
    refused = {name: _refuse(what, name) for what, names in _UNSUPPORTED.items() for name in names}
    return {
        "cudart": Runtime,
        "check_error": _check_error,
        "is_current_stream_capturing": lambda: False,
        **refused,
    }
