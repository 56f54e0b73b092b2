"""Results arrive when they would have: recorded arrivals and transfers, or an estimate.

A blocking call waits in place. An asynchronous one gets a Work that completes at its time: polling sees
it pending until then, futures and their callbacks run then, outputs change only then.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable

from torch._C._distributed_c10d import Work, _create_work_from_future  # type: ignore[attr-defined]

from ranklens_core.c10d.call import Call
from ranklens_core.c10d.ops import Kind, Returns
from ranklens_core.c10d.signature import Interned
from ranklens_core.c10d.work import FINISHED, AnySourceWork, new_future
from ranklens_core.clock import Clock
from ranklens_core.completion.cpu import Completion, CpuEngine
from ranklens_core.delivery import Fill, TimeSource
from ranklens_core.errors import TraceIncompleteError
from ranklens_core.schema import CallRecord
from ranklens_core.timing.arrival import ArrivalTimer, Basis

Transfer = Callable[[Call, Interned], int]
"""Estimated transfer time of a call in ns."""

_TIMED = (Basis.RECORDED, Basis.PEERS_ASSUMED_BINDING)


def _recorders_own(record: CallRecord | None) -> tuple[int, int]:
    """What the recorder did around a call, in ns: before it (addressing inputs) and, if it blocked, after
    it (keeping results). It is part of the recorded pace, that of all ranks, and so of the replayed one.
    """
    if record is None or record.completion is None:
        return 0, 0
    row, end = record.row, record.completion
    return row.start_ns - row.enqueue_ns, max(0, end.return_ns - end.end_ns) if end.return_ns else 0


class _Ready(threading.local):
    """How long the calling thread had waited for a core when its previous call ended."""

    delay_ns: int | None = None


class _Held:
    """An asynchronous call whose due time depends on calls that the program has yet to make."""

    __slots__ = ("arrival_ns", "entry", "submit")

    def __init__(self, entry: int, arrival_ns: int, submit: Callable[[int], None]) -> None:
        self.entry = entry
        self.arrival_ns = arrival_ns
        self.submit = submit


class InTime:
    """The ``Delivery`` that keeps the job's time.

    ``timer`` gives recorded times, ``transfer`` estimated ones for calls without; one of them may be
    None. ``exact`` says that every recorded call will be made in the recorded order (a mismatch is an
    error): only then may a due time wait for calls to come.
    """

    def __init__(
        self,
        engine: CpuEngine,
        clock: Clock,
        timer: ArrivalTimer | None,
        transfer: Transfer | None,
        *,
        exact: bool,
    ) -> None:
        self._engine = engine
        self._now_ns = clock.now_ns
        self._delay_ns = clock.thread_delay_ns
        self._ready = _Ready()
        self._timer = timer
        self._transfer = transfer
        self._exact = exact
        self._arrived_ns: dict[int, int] = {}
        self._due_ns: dict[int, int] = {}
        self._held: list[_Held] = []
        self._group_due_ns: dict[str, int] = {}
        self._works: weakref.WeakKeyDictionary[Work, Completion] = weakref.WeakKeyDictionary()
        self._failure: Exception | None = None
        self.times: Counter[str] = Counter()

    def enter(self) -> int:
        """See ``Delivery``."""
        return self._now_ns()

    def deliver(
        self, call: Call, interned: Interned, record: CallRecord | None, fill: Fill, entered_ns: int
    ) -> Work | None:
        """See ``Delivery``."""
        if self._failure is not None:
            raise self._failure
        before_ns, after_ns = _recorders_own(record)
        before_ns += self._missing_delay(record)
        if before_ns > self._now_ns() - entered_ns:
            self._engine.sleep_until(entered_ns + before_ns)
        try:
            return self._deliver(call, interned, record, fill, after_ns)
        finally:
            self._ready.delay_ns = self._delay_ns()

    def _missing_delay(self, record: CallRecord | None) -> int:
        """By how much less than when it was recorded the thread waited for a core since its last call, ns.

        There, threads that are not here had the core at times: the communication library's, that reduce
        and copy, and the recorder's.
        """
        since_ns = self._ready.delay_ns
        if record is None or since_ns is None:
            return 0
        return max(0, record.row.delayed_ns - (self._delay_ns() - since_ns))

    def _deliver(
        self, call: Call, interned: Interned, record: CallRecord | None, fill: Fill, after_ns: int
    ) -> Work | None:
        arrival_ns = self._now_ns()
        entry = record.row.entry if record is not None else -1
        due_ns = self._due(call, interned, entry, arrival_ns)
        if due_ns is not None and not call.is_async:
            self._engine.sleep_until(due_ns)
            fill()
            self._engine.sleep_until(due_ns + after_ns)
            return None if call.operator.returns is Returns.NOTHING else FINISHED
        return self._asynchronous(call, record, fill, entry, arrival_ns, due_ns)

    def before_wait(self, work: Work) -> None:
        """Wait for the result of ``work`` in the program's own thread."""
        completion = self._works.get(work)
        if completion is not None:
            self._engine.wait_for(completion)

    def close(self) -> None:
        """Deliver what nobody waited for."""
        for held in self._held:
            held.submit(self._now_ns())
        self._held.clear()
        self._engine.close()

    def _due(self, call: Call, interned: Interned, entry: int, arrival_ns: int) -> int | None:
        """When the call is due; None if that depends on calls to come."""
        if entry >= 0:
            self._arrived_ns[entry] = arrival_ns
        if self._timer is not None and entry >= 0 and self._timer.basis(entry) in _TIMED:
            due_ns = self._recorded_due(entry, arrival_ns)
            if due_ns is not None:
                self.times[TimeSource.RECORDED] += 1
                self._settle(entry, due_ns)
                return due_ns
            if self._exact:
                if not call.is_async:
                    raise TraceIncompleteError(
                        f"The recorded time of {interned.signature.op} (entry {entry}) depends on calls "
                        "that come after it, though the program waits for it: the trace contradicts "
                        "itself. Record again, or ask for --task debug."
                    )
                self.times[TimeSource.RECORDED] += 1
                return None
        due_ns = self._estimated_due(call, interned, arrival_ns)
        self.times[TimeSource.ESTIMATED] += 1
        if entry >= 0:
            self._settle(entry, due_ns)
        return due_ns

    def _estimated_due(self, call: Call, interned: Interned, arrival_ns: int) -> int:
        """Peers come when this rank does; calls of a group run one after the other."""
        if self._transfer is None:
            raise TraceIncompleteError(
                f"There is no recorded time for {interned.signature.op}, and no network to estimate one "
                "with. Name one with --network."
            )
        group = interned.signature.group
        queue = "" if call.operator.kind in (Kind.SEND, Kind.RECV) else group
        begin_ns = max(arrival_ns, self._group_due_ns.get(queue, 0)) if queue else arrival_ns
        due_ns = begin_ns + self._transfer(call, interned)
        if queue:
            self._group_due_ns[queue] = due_ns
        return due_ns

    def _recorded_due(self, entry: int, arrival_ns: int) -> int | None:
        assert self._timer is not None
        for anchor in self._timer.anchors(entry):
            if anchor.entry not in (self._due_ns if anchor.completed else self._arrived_ns):
                return None
        return self._timer.due_ns(entry, arrival_ns, self._due_ns.__getitem__, self._arrived_ns.__getitem__)

    def _settle(self, entry: int, due_ns: int) -> None:
        """``entry`` is due at ``due_ns``: calls that were held for it may be due now too."""
        self._due_ns[entry] = due_ns
        progress = bool(self._held)
        while progress:
            progress = False
            for held in list(self._held):
                held_due_ns = self._recorded_due(held.entry, held.arrival_ns)
                if held_due_ns is not None:
                    self._held.remove(held)
                    self._due_ns[held.entry] = held_due_ns
                    held.submit(held_due_ns)
                    progress = True

    def _asynchronous(
        self,
        call: Call,
        record: CallRecord | None,
        fill: Fill,
        entry: int,
        arrival_ns: int,
        due_ns: int | None,
    ) -> Work:
        future = new_future(call.device)
        result = call.result

        def arrive() -> None:
            try:
                fill()
            except Exception as error:
                # raised in the program at its next call: a Work made from a future cannot
                self._failure = error
                future.set_exception(error)
            else:
                future.set_result(result)

        work: Work = _create_work_from_future(future)

        def submit(at_ns: int) -> None:
            self._works[work] = self._engine.submit(at_ns, arrive)

        if due_ns is not None:
            submit(due_ns)
        else:
            self._held.append(_Held(entry, arrival_ns, submit))
        if call.operator.name != "recv_any_source_":
            return work
        source = record.completion.src_rank if record and record.completion else 0

        def finish(_: object) -> int:
            self.before_wait(work)
            work.wait()
            return source

        return AnySourceWork(finish, work.is_completed)
