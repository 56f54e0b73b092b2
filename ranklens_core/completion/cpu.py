"""The CPU completion engine: results arrive when they are due, in one process, in real time.

A heap of due times, and one thread that delivers what nobody waits for. A program thread that waits
for a call delivers it itself, to the microsecond and without a hop over another thread. Ties are
broken by the order of submission. While nothing is due, nothing runs.
"""

from __future__ import annotations

import ctypes
import heapq
import logging
import sys
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from ranklens_core.clock import Clock
from ranklens_core.errors import UsageError

log = logging.getLogger("ranklens")

PR_SET_TIMERSLACK = 29
"""From linux/prctl.h: how late the kernel may end a thread's sleeps (50 us unless set)."""

LATE_SAMPLES = 65_536
"""How many deliveries, the last ones, the percentiles of the lateness are of."""


class Completion:
    """One result on its way. ``done_ns`` is when it arrived, None until then."""

    __slots__ = ("_deliver", "_lock", "done_ns", "due_ns", "order")

    def __init__(self, due_ns: int, order: int, deliver: Callable[[], None]) -> None:
        self.due_ns = due_ns
        self.order = order
        self.done_ns: int | None = None
        self._deliver: Callable[[], None] | None = deliver
        self._lock = threading.Lock()

    def __lt__(self, other: Completion) -> bool:
        return (self.due_ns, self.order) < (other.due_ns, other.order)

    def deliver(self, clock: Clock) -> bool:
        """Deliver unless it has been; whoever comes second waits for the first. True for the first."""
        with self._lock:
            deliver, self._deliver = self._deliver, None
            if deliver is None:
                return False
            self.done_ns = clock.now_ns()
            deliver()
            return True


@dataclass(frozen=True)
class Lateness:
    """Delivered minus due, ns, over ``count`` deliveries; zeros if there were none."""

    count: int
    p50_ns: int
    p99_ns: int
    max_ns: int


class CpuEngine:
    """Delivers submitted results at their times until ``close``.

    ``threaded=False`` leaves the thread out: then results arrive in ``wait_for``, ``sleep_until`` and
    ``run_due`` alone, which with a manual clock makes time exact.
    """

    def __init__(self, clock: Clock, *, threaded: bool = True) -> None:
        self._clock = clock
        self._heap: list[Completion] = []
        self._changed = threading.Condition()
        self._orders = 0
        self._closed = False
        self._paused = False
        self._noting = threading.Lock()
        self._late_ns: deque[int] = deque(maxlen=LATE_SAMPLES)
        self._latest_ns = 0
        self._arrived = 0
        self._thread: threading.Thread | None = None
        self._switch_interval_s = sys.getswitchinterval()
        if threaded:
            # a due result must not wait 5 ms for the GIL of a thread that computes in Python
            sys.setswitchinterval(1e-4)
            self._thread = threading.Thread(target=self._run, name="ranklens-completion", daemon=True)
            self._thread.start()

    def submit(self, due_ns: int, deliver: Callable[[], None]) -> Completion:
        """Have ``deliver()`` called at ``due_ns``. It must not raise."""
        with self._changed:
            if self._closed:
                raise UsageError("The replay is over: no call can be answered any more.")
            completion = Completion(due_ns, self._orders, deliver)
            self._orders += 1
            if not self._paused:
                heapq.heappush(self._heap, completion)
                if self._heap[0] is completion:
                    self._changed.notify()
                return completion
        # made at a debugger's prompt, which may wait for it in a way that time does not see
        completion.deliver(self._clock)
        return completion

    def pause(self) -> None:
        """The clock stands still: until ``resume``, what is submitted is delivered at once."""
        with self._changed:
            self._paused = True

    def resume(self) -> None:
        """The clock goes on."""
        with self._changed:
            self._paused = False
            self._changed.notify()

    def wait_for(self, completion: Completion) -> None:
        """Block until ``completion`` has arrived; the calling thread delivers it at its time."""
        self.sleep_until(completion.due_ns)
        if completion.deliver(self._clock):
            self._note(completion)

    def sleep_until(self, due_ns: int) -> None:
        """Block the calling thread; without an engine thread, deliver what is due meanwhile."""
        if self._thread is None:
            while (completion := self._pop(due_ns)) is not None:
                self._clock.sleep_until(completion.due_ns)
                self._deliver(completion)
        self._clock.sleep_until(due_ns)

    def arrive_at(self, due_ns: int) -> None:
        """``sleep_until`` for a result that the calling thread itself takes: its lateness counts."""
        self.sleep_until(due_ns)
        self.note_late(self._clock.now_ns() - due_ns)

    def run_due(self) -> None:
        """Deliver all that is due by now, in order."""
        while (completion := self._pop(self._clock.now_ns())) is not None:
            self._deliver(completion)

    def lateness(self) -> Lateness:
        """How late results were."""
        late = sorted(self._late_ns)
        if not late:
            return Lateness(0, 0, 0, 0)
        last = len(late) - 1
        return Lateness(self._arrived, late[last // 2], late[last * 99 // 100], self._latest_ns)

    def close(self) -> None:
        """Deliver what is left at once and end the thread. Idempotent.

        Left over are calls the program never waited for; their callers may still hold their handles.
        """
        with self._changed:
            if self._closed:
                return
            self._closed = True
            left, self._heap = sorted(self._heap), []
            self._changed.notify()
        if self._thread is not None:
            if threading.current_thread() is not self._thread:
                self._thread.join()
            sys.setswitchinterval(self._switch_interval_s)
        for completion in left:
            completion.deliver(self._clock)

    def _run(self) -> None:
        tighten_timers()
        while True:
            with self._changed:
                if self._closed:
                    return
                if self._paused or not self._heap:
                    self._changed.wait()
                    continue
                left_ns = self._heap[0].due_ns - self._clock.now_ns()
                if left_ns > 0:
                    # woken early if something earlier is submitted
                    self._changed.wait(left_ns / 1e9)
                    continue
            self.run_due()

    def _pop(self, by_ns: int) -> Completion | None:
        with self._changed:
            if self._heap and self._heap[0].due_ns <= by_ns:
                return heapq.heappop(self._heap)
        return None

    def _deliver(self, completion: Completion) -> None:
        if completion.deliver(self._clock):
            self._note(completion)

    def _note(self, completion: Completion) -> None:
        if completion.done_ns is not None:
            self.note_late(completion.done_ns - completion.due_ns)

    def note_late(self, late_ns: int) -> None:
        """A result that the calling thread took by itself was so late."""
        with self._noting:
            self._arrived += 1
            self._late_ns.append(late_ns)
            if late_ns > self._latest_ns:
                self._latest_ns = late_ns


def tighten_timers() -> None:
    """Let the calling thread's sleeps end on time; where that cannot be, they end 50 us late."""
    try:
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0)
    except (OSError, AttributeError):
        log.debug("timer slack cannot be set on this system")
