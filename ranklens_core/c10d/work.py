"""Work handles whose completion RankLens sees or decides.

A Work made from a future lives as long as C++ needs it and serves every way of observing it:
``wait``, ``is_completed``, ``get_future`` (the DDP reducer), ``wait_tensor`` (functional
collectives). A Python subclass of Work would hang its C++ waiters once Python drops it.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch

# torch's stubs lack the second
from torch._C._distributed_c10d import (  # type: ignore[attr-defined]
    Work,
    _create_work_from_future,
)


def completed_work(result: Any, device: torch.device) -> Work:
    """A Work that is complete, with ``result`` (tensors in lists) in its future."""
    future = new_future(device)
    future.set_result(result)
    work: Work = _create_work_from_future(future)
    return work


def new_future(device: torch.device) -> torch.futures.Future[Any]:
    """A future that carries CUDA events where the tensors live on a GPU."""
    return torch.futures.Future(devices=[device] if device.type == "cuda" else None)


FINISHED = completed_work([], torch.device("cpu"))
"""The Work of every call that is over when it returns and whose caller, by ``async_op=False``, looks at
nothing else: making one for each would take longer than the rest of such a call."""

_FINISHED_BOXED = FINISHED.boxed()


def boxed(work: Work) -> torch.ScriptObject:
    """``work`` as an operator returns it."""
    return _FINISHED_BOXED if work is FINISHED else work.boxed()


def pending_work(device: torch.device) -> Work:
    """A Work that never completes."""
    work: Work = _create_work_from_future(new_future(device))
    return work


def failed_work(error: BaseException, device: torch.device) -> Work:
    """A Work that has failed with ``error``. Its ``wait`` does not raise it: see ``wait_for``."""

    def fail(_: torch.futures.Future[Any]) -> None:
        raise error

    # set_exception would do for Python alone: to C++ that is a future with a value
    future = new_future(device)
    failing = future.then(fail)
    future.set_result(None)
    work: Work = _create_work_from_future(failing)
    return work


ORIGINAL_WAIT: Callable[..., Any] = Work.wait
"""``Work.wait`` as torch has it: RankLens' own waiting is not the program's."""

NO_TIMEOUT = timedelta(0)
"""What torch takes for no limit to a wait."""


def wait_for(work: Work, timeout: timedelta = NO_TIMEOUT) -> bool:
    """``work.wait(timeout)``, with a limit for Works made from a future too, which torch lacks.

    A Work made from a future returns even if that future failed: whoever made it must raise.
    """
    try:
        return bool(ORIGINAL_WAIT(work, timeout))
    except RuntimeError as error:
        if "finite timeout not implemented" not in str(error):
            raise
    done = threading.Event()
    work.get_future().add_done_callback(lambda _: done.set())
    if not done.wait(timeout.total_seconds()):
        raise RuntimeError("Operation timed out!")  # torch's own words, from Work::wait
    return True


class CompletionWatcher:
    """Runs a callback when a real Work completes, before anybody else can observe it."""

    def __init__(self) -> None:
        self._waiters = _Waiters()

    def after(
        self,
        work: Work,
        tensors: list[torch.Tensor],
        device: torch.device,
        on_done: Callable[[BaseException | None], None],
    ) -> Work:
        """A Work that completes once ``work`` has and ``on_done(error)`` has returned.

        Its result is that of ``work``; ``tensors`` where that has none. Its future fails if
        ``work`` does, but its ``wait`` does not raise: the caller must, from ``on_done``.
        """
        try:
            future = work.get_future()
            has_result = True
        except RuntimeError:
            # gloo's point-to-point and reduce-scatter works have none: their end is seen in wait() alone
            future = self._future_of_wait(work, device)
            has_result = False

        def done(finished: torch.futures.Future[Any]) -> Any:
            try:
                result = finished.wait()  # done already: this raises what went wrong, if something did
            except BaseException as error:
                # without its frames, which would keep the call and its process group alive
                on_done(error.with_traceback(None))
                raise RuntimeError(str(error)) from None  # C++ keeps the text alone
            on_done(None)
            return result if has_result else tensors

        watched: Work = _create_work_from_future(future.then(done))
        return watched

    def _future_of_wait(self, work: Work, device: torch.device) -> torch.futures.Future[Any]:
        future = new_future(device)
        # gloo's reduce-scatter copies in wait(): as the program's own thread would
        grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()

        def wait() -> None:
            try:
                with torch.inference_mode(inference), torch.set_grad_enabled(grad):
                    ORIGINAL_WAIT(work)
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(None)

        self._waiters.submit(wait)
        return future


class _Waiters:
    """Background threads that each wait for one call, reused, as many as there are calls in flight.

    Daemons, unlike a ThreadPoolExecutor's: a receive whose peer died must not keep a failing rank
    from ending.
    """

    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._idle = 0

    def submit(self, task: Callable[[], None]) -> None:
        with self._lock:
            start = self._idle == 0
            self._idle -= not start
        self._tasks.put(task)
        if start:
            threading.Thread(target=self._run, name="ranklens-p2p", daemon=True).start()

    def _run(self) -> None:
        while True:
            self._tasks.get()()
            with self._lock:
                self._idle += 1


class AnySourceWork(Work):
    """A receive from any source: the one handle that must know its source rank.

    torch asks it in Python only (``dist.recv`` without ``src``), so that a Python Work is safe
    here: its caller holds it.
    """

    def __init__(self, finish: Callable[[timedelta], int], arrived: Callable[[], bool]) -> None:
        """``finish(timeout)`` blocks until the message is there and returns the sender's group rank;
        ``arrived`` tells whether it is."""
        super().__init__()
        self._finish = finish
        self._arrived = arrived
        self._source: int | None = None

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        if self._source is None:
            self._source = self._finish(timeout)
        return True

    def is_completed(self) -> bool:
        return self._source is not None or self._arrived()

    def is_success(self) -> bool:
        return self._source is not None

    def _source_rank(self) -> int:
        self.wait()
        assert self._source is not None
        return self._source

    source_rank = _source_rank


def storage_of(tensor: torch.Tensor) -> int:
    """What torch knows a functional collective's Work by: the storage of its output."""
    return int(tensor.untyped_storage()._cdata) if tensor.layout is torch.strided else 0


class Handles:
    """Which entry of the log a Work belongs to, for as long as somebody holds the Work."""

    def __init__(self) -> None:
        self._entries: weakref.WeakKeyDictionary[Work, int] = weakref.WeakKeyDictionary()
        self._last = threading.local()

    def track(self, work: Work, entry: int) -> Work:
        """Remember ``work``; hold it until the thread's next call, by when its caller has it."""
        self._entries[work] = entry
        self._last.work = work
        return work

    def release(self) -> None:
        """Let go of the thread's last Work: its caller has it by now, or never will."""
        self._last.work = None

    def is_held(self, entry: int) -> bool:
        """Whether somebody in Python holds the Work of ``entry``."""
        return entry in self._entries.values()

    def entry_of(self, work: Work) -> int | None:
        """The entry of ``work``, None if it is not ours."""
        return self._entries.get(work)
