"""RankLens' own work while it replays in time, and what the program is to notice of it.

Recorded wall times have the recorder's own work in them, on all ranks: the replay takes as long for it
(``Recorded``). A virtual timeline has none of it: what the replay's own work takes is made up for
(``Excluded``).
"""

from __future__ import annotations

import threading
from typing import Protocol

from ranklens_core.clock import Clock, PausableClock
from ranklens_core.schema import CallRecord


class OwnWork(Protocol):
    """Asked by the delivery about every call and wait, in the program's thread."""

    def enter(self) -> int:
        """The program makes a call or begins to wait: when that was, ns."""
        ...

    def begin_ns(self, entered_ns: int, record: CallRecord | None) -> int:
        """When the call that was entered at ``entered_ns`` counts as made."""
        ...

    def after_ns(self, record: CallRecord | None) -> int:
        """How long a blocking call holds the program after its result is there."""
        ...

    def wait_begin_ns(self, entered_ns: int) -> int:
        """When the wait that was entered at ``entered_ns`` counts as begun."""
        ...

    def leave(self, due_ns: int) -> int:
        """The program goes on from a call that held it; it was to do so at ``due_ns``. The time that it is
        then, ns."""
        ...

    def leave_wait(self, due_ns: int) -> int:
        """As ``leave``, from a wait."""
        ...

    def pass_by(self, due_ns: int) -> None:
        """The program goes on from a call that did not hold it; it was to do so at ``due_ns``."""
        ...


class _Ready(threading.local):
    """How long the calling thread had waited for a core when its previous call ended."""

    delay_ns: int | None = None


class Recorded:
    """The recorder's work is part of the recorded pace, and so of the replayed one."""

    def __init__(self, clock: Clock) -> None:
        self.enter = clock.now_ns
        self._now_ns = clock.now_ns
        self._delay_ns = clock.thread_delay_ns
        self._ready = _Ready()

    def begin_ns(self, entered_ns: int, record: CallRecord | None) -> int:
        """After what the recorder did before the call (addressing inputs)."""
        before_ns = self._missing_delay_ns(record)
        if record is not None and record.completion is not None:
            before_ns += record.row.start_ns - record.row.enqueue_ns
        return max(self._now_ns(), entered_ns + before_ns)

    def after_ns(self, record: CallRecord | None) -> int:
        """What the recorder did after a call that blocked (keeping results)."""
        end = record.completion if record is not None else None
        return max(0, end.return_ns - end.end_ns) if end is not None and end.return_ns else 0

    def wait_begin_ns(self, entered_ns: int) -> int:
        """See ``OwnWork``."""
        return entered_ns

    def leave(self, due_ns: int) -> int:
        """See ``OwnWork``."""
        self._ready.delay_ns = self._delay_ns()
        return self._now_ns()

    def leave_wait(self, due_ns: int) -> int:
        """What was recorded is since the last call."""
        return self._now_ns()

    def pass_by(self, due_ns: int) -> None:
        """See ``OwnWork``."""
        self._ready.delay_ns = self._delay_ns()

    def _missing_delay_ns(self, record: CallRecord | None) -> int:
        """By how much less than when it was recorded the thread waited for a core since its last call, ns.

        There, threads that are not here had the core at times: the communication library's, that reduce
        and copy, and the recorder's.
        """
        since_ns = self._ready.delay_ns
        if record is None or since_ns is None:
            return 0
        return max(0, record.row.delayed_ns - (self._delay_ns() - since_ns))


class _Behind(threading.local):
    """How far the thread is behind where it would be if RankLens' own work took no time, ns, and its CPU
    time when its current call was entered."""

    behind_ns = 0
    entered_cpu_ns = 0


class Excluded:
    """RankLens' work counts as no time.

    What it takes in calls that do not hold the program is made up for in the next that does: that one counts
    as made earlier by as much. By what a call or wait is too short to make up for, the clock is set back.
    Only CPU time that RankLens used is made up for, not a busy machine.
    """

    def __init__(self, clock: PausableClock) -> None:
        self._clock = clock
        self._now_ns = clock.now_ns
        self._cpu_ns = clock.thread_cpu_ns
        self._thread = _Behind()

    def enter(self) -> int:
        """See ``OwnWork``."""
        self._thread.entered_cpu_ns = self._cpu_ns()
        return self._now_ns()

    def begin_ns(self, entered_ns: int, record: CallRecord | None) -> int:
        """See ``OwnWork``."""
        return entered_ns - self._thread.behind_ns

    def after_ns(self, record: CallRecord | None) -> int:
        """Nothing."""
        return 0

    def wait_begin_ns(self, entered_ns: int) -> int:
        """See ``OwnWork``."""
        return entered_ns - self._thread.behind_ns

    def pass_by(self, due_ns: int) -> None:
        """See ``OwnWork``."""
        self._thread.behind_ns = self._late_ns(due_ns)

    def leave(self, due_ns: int) -> int:
        """See ``OwnWork``."""
        self._clock.set_back(self._late_ns(due_ns))
        self._thread.behind_ns = 0
        return self._now_ns()

    leave_wait = leave

    def _late_ns(self, due_ns: int) -> int:
        """How late it is because of RankLens' own work."""
        thread = self._thread
        most_ns = thread.behind_ns + self._cpu_ns() - thread.entered_cpu_ns
        return min(max(0, self._now_ns() - due_ns), most_ns)
