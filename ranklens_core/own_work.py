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


class _Lead(threading.local):
    """Where the thread is against where it would be, ns: ``ahead_ns`` (below 0: behind); its CPU time when
    its current call was entered; when its previous call ended, and its CPU time then."""

    ahead_ns = 0
    entered_cpu_ns = 0
    left_ns: int | None = None
    left_cpu_ns = 0


class Recorded:
    """The recorder's work is part of the recorded pace, and so of the replayed one.

    What a call that does not hold the program lacks of it (or has too much) is made up for in the next that
    does: that one counts as made later (or earlier) by as much. A sleep for each would take longer than what
    it is for.
    """

    def __init__(self, clock: Clock) -> None:
        self._now_ns = clock.now_ns
        self._cpu_ns = clock.thread_cpu_ns
        self._thread = _Lead()

    def enter(self) -> int:
        """See ``OwnWork``."""
        self._thread.entered_cpu_ns = self._cpu_ns()
        return self._now_ns()

    def begin_ns(self, entered_ns: int, record: CallRecord | None) -> int:
        """After what the recorder did before the call (addressing inputs)."""
        before_ns = self._thread.ahead_ns + self._missing_delay_ns(entered_ns, record)
        if record is not None and record.completion is not None:
            before_ns += record.row.start_ns - record.row.enqueue_ns
        return entered_ns + before_ns

    def after_ns(self, record: CallRecord | None) -> int:
        """What the recorder did after a call that blocked (keeping results)."""
        end = record.completion if record is not None else None
        return max(0, end.return_ns - end.end_ns) if end is not None and end.return_ns else 0

    def wait_begin_ns(self, entered_ns: int) -> int:
        """See ``OwnWork``."""
        return entered_ns + self._thread.ahead_ns

    def leave(self, due_ns: int) -> int:
        """See ``OwnWork``."""
        thread = self._thread
        thread.left_ns, thread.left_cpu_ns = self._settle(due_ns)
        return thread.left_ns

    def leave_wait(self, due_ns: int) -> int:
        """See ``OwnWork``."""
        return self._settle(due_ns)[0]

    def pass_by(self, due_ns: int) -> None:
        """See ``OwnWork``."""
        self.leave(due_ns)

    def _settle(self, due_ns: int) -> tuple[int, int]:
        """How far ahead or behind ``due_ns`` the thread is; the time and its CPU time, ns.

        A busy machine makes late too: only CPU time that RankLens used is made up for.
        """
        thread = self._thread
        now_ns, cpu_ns = self._now_ns(), self._cpu_ns()
        used_ns = cpu_ns - thread.entered_cpu_ns
        thread.ahead_ns = max(due_ns - now_ns, min(thread.ahead_ns, 0) - used_ns)
        return now_ns, cpu_ns

    def _missing_delay_ns(self, entered_ns: int, record: CallRecord | None) -> int:
        """By how much longer the recorded thread waited for a core since its last call than this one waited
        for anything, ns.

        There, threads that are not here had the core at times: the communication library's, that reduce
        and copy, and the recorder's. Here it is the GIL at times, while another thread restores a result.
        """
        thread = self._thread
        if record is None or thread.left_ns is None:
            return 0
        off_ns = entered_ns - thread.left_ns - (thread.entered_cpu_ns - thread.left_cpu_ns)
        return max(0, record.row.delayed_ns - max(0, off_ns))


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
