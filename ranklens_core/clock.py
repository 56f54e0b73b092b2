"""Where time comes from: integer nanoseconds, passed in, never read globally.

``MonotonicClock`` is CLOCK_MONOTONIC, which all processes of one host share, so that ranks of a
host need no alignment among each other. ``ManualClock`` is for tests.
"""

from __future__ import annotations

import io
import os
import threading
import time
from typing import NamedTuple, Protocol


class Clock(Protocol):
    """A source of integer nanoseconds."""

    def now_ns(self) -> int:
        """Nanoseconds since an arbitrary, fixed origin; never goes back."""
        ...

    def thread_cpu_ns(self) -> int:
        """CPU nanoseconds the calling thread has used."""
        ...

    def thread_delay_ns(self) -> int:
        """Nanoseconds for which the calling thread was ready to run but others had its core; 0 where the
        process has more than one core, or the system does not tell."""
        ...

    def realtime_ns(self) -> int:
        """Nanoseconds since the Unix epoch, to tie this clock to other hosts'."""
        ...

    def sleep_until(self, due_ns: int) -> None:
        """Return at ``due_ns``, at once if it is past."""
        ...


WATCH_NS = 20_000
"""A sleep ends about this much late on Linux, once the thread's timer slack is out of the way."""


class MonotonicClock:
    """The host's monotonic clock (shared by its processes, origin is boot)."""

    now_ns = staticmethod(time.monotonic_ns)
    thread_cpu_ns = staticmethod(time.thread_time_ns)
    realtime_ns = staticmethod(time.time_ns)

    def __init__(self) -> None:
        self._run_delay = _RunDelay()

    def thread_delay_ns(self) -> int:
        """The scheduler's ``run_delay``: the second number of /proc/<pid>/task/<tid>/schedstat on Linux
        (Documentation/scheduler/sched-stats.rst in its source)."""
        return self._run_delay.read_ns()

    def sleep_until(self, due_ns: int) -> None:
        """Sleep, and watch the clock for the last microseconds; never holds the GIL while it sleeps."""
        while (left_ns := due_ns - time.monotonic_ns()) > 0:
            if left_ns > WATCH_NS:
                time.sleep((left_ns - WATCH_NS) / 1e9)


class _RunDelay(threading.local):
    """The calling thread's ``schedstat``, opened once a thread and process."""

    def __init__(self) -> None:
        self._pid = 0
        self._file: io.FileIO | None = None

    def read_ns(self) -> int:
        if self._pid != os.getpid():  # a forked child is another thread
            self._pid = os.getpid()
            self._file = self._open()
        return int(os.pread(self._file.fileno(), 64, 0).split()[1]) if self._file else 0

    @staticmethod
    def _open() -> io.FileIO | None:
        if not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) > 1:
            return None  # other threads have other cores: not worth 1 us a read
        try:
            file = io.FileIO(f"/proc/self/task/{threading.get_native_id()}/schedstat")
        except OSError:
            return None  # not Linux, or a kernel without scheduler statistics
        return file


class ManualClock:
    """A clock that moves only when told to; CPU time moves with it, but for ``cpu_off_ns``.

    >>> clock = ManualClock()
    >>> clock.advance(5)
    >>> clock.now_ns()
    5
    """

    def __init__(self, now_ns: int = 0) -> None:
        self._now_ns = now_ns
        self.cpu_off_ns = 0
        self._moved = threading.Condition()

    def now_ns(self) -> int:
        return self._now_ns

    def thread_cpu_ns(self) -> int:
        return self._now_ns - self.cpu_off_ns

    def thread_delay_ns(self) -> int:
        return 0

    def realtime_ns(self) -> int:
        return self._now_ns

    def sleep_until(self, due_ns: int) -> None:
        """It is ``due_ns`` now, if it was not later already."""
        self.advance(max(0, due_ns - self._now_ns))

    def advance(self, by_ns: int) -> None:
        """Move forward by ``by_ns`` (>= 0) nanoseconds and wake whoever waits for a time."""
        if by_ns < 0:
            raise ValueError(f"a clock never goes back: advance({by_ns})")
        with self._moved:
            self._now_ns += by_ns
            self._moved.notify_all()


class _Pace(NamedTuple):
    """``lost_ns`` of the clock below were spent in pauses; ``paused_ns`` is the time during one."""

    lost_ns: int
    paused_ns: int | None


class PausableClock:
    """Another clock that stands still between ``pause`` and ``resume``, while a debugger waits for its user.

    Whoever sleeps meanwhile sleeps on, but for the thread that paused: what it waits for at the debugger's
    prompt would never come, so time moves on to there.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._pace = _Pace(0, None)
        self._depth = 0
        self._set_back_ns = 0
        self._holder: int | None = None
        self._changed = threading.Condition()
        self.thread_cpu_ns = clock.thread_cpu_ns
        self.thread_delay_ns = clock.thread_delay_ns
        self.realtime_ns = clock.realtime_ns

    @property
    def lost_ns(self) -> int:
        """How long all pauses together were."""
        return self._pace.lost_ns - self._set_back_ns

    def now_ns(self) -> int:
        """Goes back only where it is set back: a pause that began or ended while this looked makes it look
        again."""
        while True:
            pace = self._pace
            now_ns = self._clock.now_ns() - pace.lost_ns if pace.paused_ns is None else pace.paused_ns
            if self._pace is pace:
                return now_ns

    def set_back(self, by_ns: int) -> None:
        """The last ``by_ns`` count as no time: for work of our own that the program is not to notice."""
        with self._changed:
            self._set_back_ns += by_ns
            self._pace = self._pace._replace(lost_ns=self._pace.lost_ns + by_ns)

    def pause(self) -> None:
        """Stand still until as many calls of ``resume``."""
        with self._changed:
            self._depth += 1
            if self._depth == 1:
                self._holder = threading.get_ident()
                self._pace = _Pace(self._pace.lost_ns, self._clock.now_ns() - self._pace.lost_ns)

    def resume(self) -> None:
        """Go on from where it stood."""
        with self._changed:
            self._depth -= 1
            paused_ns = self._pace.paused_ns
            if self._depth == 0 and paused_ns is not None:
                self._holder = None
                self._pace = _Pace(self._clock.now_ns() - paused_ns, None)
                self._changed.notify_all()

    def sleep_until(self, due_ns: int) -> None:
        """Return at ``due_ns`` of this clock."""
        while self.now_ns() < due_ns:
            pace = self._pace
            if pace.paused_ns is None:
                self._clock.sleep_until(due_ns + pace.lost_ns)
            elif self._holder == threading.get_ident():
                self._pace = pace._replace(paused_ns=due_ns)
            else:
                with self._changed:
                    self._changed.wait_for(lambda: self._depth == 0)
