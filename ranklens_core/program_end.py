"""What python still does when a program's last line is through: its threads end, its exit handlers run.

Calls that are made then belong to the run like any other.
"""

from __future__ import annotations

import atexit
import logging
import sys
import sysconfig
import threading
import traceback
from collections.abc import Callable
from types import FrameType
from typing import Any, NamedTuple

from ranklens_core.patches import Patches

log = logging.getLogger("ranklens")

TELL_S = 10.0
"""After this time it is said that the program's threads are waited for."""

_LIBRARIES = tuple({path.rstrip("/") + "/" for path in sysconfig.get_paths().values() if path})


class _Handler(NamedTuple):
    function: Callable[..., object]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class ProgramEnd:
    """Within the block the program's own ``atexit`` handlers are kept; ``finish`` does what python would.

    Handlers that libraries register stay python's: they end what RankLens may still need. Threads that were
    there before are nobody's here, and those of executors wait for work that nobody sends.
    """

    def __init__(self) -> None:
        self._patches = Patches()
        self._handlers: list[_Handler] = []
        self._before = frozenset(threading.enumerate())

    def __enter__(self) -> ProgramEnd:
        register, unregister = atexit.register, atexit.unregister

        def keep(function: Callable[..., object], *args: Any, **kwargs: Any) -> Callable[..., object]:
            if _is_library(sys._getframe(1)):
                return register(function, *args, **kwargs)
            self._handlers.append(_Handler(function, args, kwargs))
            return function

        def forget(function: Callable[..., object]) -> None:
            self._handlers = [handler for handler in self._handlers if handler.function != function]
            unregister(function)

        self._patches.set(atexit, "register", keep)
        self._patches.set(atexit, "unregister", forget)
        return self

    def __exit__(self, *_: object) -> None:
        self._patches.undo()
        for handler in self._handlers:  # the program failed: they run when python ends, as they would
            atexit.register(handler.function, *handler.args, **handler.kwargs)

    def finish(self) -> None:
        """Wait for the program's threads, then call its exit handlers, the last one first."""
        told = False
        while threads := self._threads():
            threads[0].join(TELL_S)
            if threads[0].is_alive() and not told:
                told = True
                log.info(
                    "the program's main thread has ended; waiting for %s",
                    ", ".join(thread.name for thread in threads),
                )
        while self._handlers:
            handler = self._handlers.pop()
            try:
                handler.function(*handler.args, **handler.kwargs)
            except Exception:
                print(f"Exception ignored in atexit callback: {handler.function}", file=sys.stderr)
                traceback.print_exc()

    def _threads(self) -> list[threading.Thread]:
        executors = sys.modules.get("concurrent.futures.thread")
        idle = getattr(executors, "_threads_queues", ())
        return [
            thread
            for thread in threading.enumerate()
            if not thread.daemon
            and thread not in self._before
            and thread not in idle
            and thread is not threading.current_thread()
        ]


def _is_library(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith((*_LIBRARIES, "<frozen"))
