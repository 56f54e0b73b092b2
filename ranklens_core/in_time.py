"""Results arrive when they would have: recorded arrivals and transfers, or an estimate.

A blocking call waits in place. An asynchronous one gets a Work that completes at its time: polling sees
it pending until then, futures and their callbacks run then, outputs change only then.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch._C._distributed_c10d import Work, _create_work_from_future  # type: ignore[attr-defined]

from ranklens_core.c10d.call import Call
from ranklens_core.c10d.ops import Kind, Returns
from ranklens_core.c10d.signature import Interned
from ranklens_core.c10d.work import FINISHED, AnySourceWork, new_future, storage_of
from ranklens_core.clock import PausableClock
from ranklens_core.completion.cpu import Completion, CpuEngine
from ranklens_core.delivery import Fill, TimeSource
from ranklens_core.errors import TraceIncompleteError
from ranklens_core.own_work import Excluded, OwnWork, Recorded
from ranklens_core.schema import CallRecord, GroupRecord
from ranklens_core.spans import Spans, Subject, is_profiling
from ranklens_core.timing.arrival import ArrivalTimer, Basis
from ranklens_core.timing.exposed import ExposedMeter

Transfer = Callable[[Call, Interned], int]
"""Estimated transfer time of a call in ns."""

MAX_AHEAD_NS = 300_000
"""How far a call that does not block lets the program run ahead; what is more is slept at once."""

_TIMED = (Basis.RECORDED, Basis.PEERS_ASSUMED_BINDING)


class Due(NamedTuple):
    """When a call's result arrives, and when the last of its peers does, from where its transfer runs, ns."""

    due_ns: int
    ready_ns: int
    source: TimeSource


class _Flight(NamedTuple):
    """An asynchronous call on its way."""

    completion: Completion
    due: Due
    subject: Subject


class _Held:
    """An asynchronous call whose due time depends on calls that the program has yet to make."""

    __slots__ = ("arrival_ns", "entry", "submit")

    def __init__(self, entry: int, arrival_ns: int, submit: Callable[[Due], None]) -> None:
        self.entry = entry
        self.arrival_ns = arrival_ns
        self.submit = submit


class InTime:
    """The ``Delivery`` that keeps the job's time.

    ``timer`` gives recorded times, ``transfer`` estimated ones for calls without; one of them may be
    None. ``exact`` says that every recorded call will be made in the recorded order (a mismatch is an
    error): only then may a due time wait for calls to come. ``virtual`` says that the timer's times are of a
    virtual timeline: they count as estimated, and RankLens' own work is not in them. ``groups`` names the
    groups in profiles. ``exposed`` adds up how long calls held the program.
    """

    def __init__(
        self,
        engine: CpuEngine,
        clock: PausableClock,
        timer: ArrivalTimer | None,
        transfer: Transfer | None,
        *,
        exact: bool,
        virtual: bool = False,
        groups: Mapping[str, GroupRecord] | None = None,
    ) -> None:
        self._engine = engine
        self._now_ns = clock.now_ns
        self._own: OwnWork = Excluded(clock) if virtual else Recorded(clock)
        self._source = TimeSource.ESTIMATED if virtual else TimeSource.RECORDED
        self._timer = timer
        self._transfer = transfer
        self._exact = exact
        self._arrived_ns: dict[int, int] = {}
        self._due_ns: dict[int, int] = {}
        self._held: list[_Held] = []
        self._group_due_ns: dict[str, int] = {}
        self._batches: weakref.WeakKeyDictionary[Work, list[Work]] = weakref.WeakKeyDictionary()
        self._works: weakref.WeakKeyDictionary[Work, _Flight] = weakref.WeakKeyDictionary()
        self._flight_of_storage: dict[int, _Flight] = {}
        self._spans = Spans(groups or {})
        self.exposed = ExposedMeter()
        self._failure: Exception | None = None
        self.times: Counter[str] = Counter()
        self.alike = 0
        """How many calls were not recorded and came at the pace of a recorded one."""

    def enter(self) -> int:
        """See ``Delivery``."""
        return self._own.enter()

    def deliver(
        self,
        call: Call,
        interned: Interned,
        record: CallRecord | None,
        fill: Fill,
        entered_ns: int,
        alike: CallRecord | None = None,
    ) -> Work | None:
        """See ``Delivery``."""
        if self._failure is not None:
            raise self._failure
        pace = record or alike
        arrival_ns = self._own.begin_ns(entered_ns, pace)
        entry = pace.row.entry if pace is not None else -1
        due = self._due(call, interned, entry, arrival_ns, is_recorded=record is not None)
        subject = Subject(call.operator.name, interned, record)
        if due is not None and not call.is_async:
            self._block(subject, due, fill, arrival_ns, self._own.after_ns(pace))
            return None if call.operator.returns is Returns.NOTHING else FINISHED
        work = self._asynchronous(call, subject, fill, entry, arrival_ns, due)
        if arrival_ns - self._now_ns() > MAX_AHEAD_NS:
            self._engine.sleep_until(arrival_ns)
        self._own.pass_by(arrival_ns)
        return work

    def batch(self, works: list[Work], device: torch.device) -> Work:
        """See ``Delivery``: complete when the last of ``works`` is."""
        future = new_future(device)
        batch: Work = _create_work_from_future(future)
        left = len(works)
        lock = threading.Lock()

        def one_done(_: object) -> None:
            nonlocal left
            with lock:
                left -= 1
                last = left == 0
            if last:
                future.set_result([])

        for work in works:
            work.get_future().add_done_callback(one_done)
        if not works:
            future.set_result([])
        self._batches[batch] = works
        return batch

    def before_wait(self, work: Work) -> None:
        """Wait for the result of ``work`` in the program's own thread."""
        for member in self._batches.get(work, (work,)):
            self._wait(self._works.get(member))

    def before_wait_tensor(self, tensor: torch.Tensor) -> None:
        """As ``before_wait``, for the call that ``tensor`` is a result of."""
        self._wait(self._flight_of_storage.pop(storage_of(tensor), None))

    def _block(self, subject: Subject, due: Due, fill: Fill, arrival_ns: int, after_ns: int) -> None:
        """A blocking call: nobody sees its outputs before it returns, so they are written first, and one
        sleep is enough (a sleep costs more than the rest of such a call)."""
        fill()
        if is_profiling():
            self._hold(subject, due, arrival_ns, lambda: self._engine.arrive_at(due.due_ns), self._own.leave)
            self._engine.sleep_until(due.due_ns + after_ns)
            return
        free_ns = due.due_ns + after_ns
        self._engine.sleep_until(free_ns)
        left_ns = self._own.leave(free_ns)
        self._engine.note_late(left_ns - free_ns)
        estimated = due.source is TimeSource.ESTIMATED
        self.exposed.add(arrival_ns, due.ready_ns, max(arrival_ns, left_ns - after_ns), estimated=estimated)

    def _wait(self, flight: _Flight | None) -> None:
        if flight is None:
            return
        begin_ns = self._own.wait_begin_ns(self._own.enter())
        if flight.completion.done_ns is not None:
            self._own.leave_wait(max(begin_ns, flight.due.due_ns))
            return
        self._hold(
            flight.subject,
            flight.due,
            begin_ns,
            lambda: self._engine.wait_for(flight.completion),
            self._own.leave_wait,
        )

    def _hold(
        self,
        subject: Subject,
        due: Due,
        begin_ns: int,
        until_due: Callable[[], None],
        leave: Callable[[int], int],
    ) -> None:
        """The program is held by a call from ``begin_ns`` on: ``until_due()`` returns when the result is
        there, ``leave(due_ns)`` tells when the program goes on."""
        if is_profiling():
            with self._spans.communication(subject, due.source):
                if due.ready_ns > begin_ns:
                    with self._spans.waiting(subject, due.source):
                        self._engine.sleep_until(due.ready_ns)
                with self._spans.transfer(subject, due.source):
                    until_due()
        else:
            until_due()
        left_ns = max(begin_ns, leave(max(begin_ns, due.due_ns)))
        estimated = due.source is TimeSource.ESTIMATED
        self.exposed.add(begin_ns, due.ready_ns, left_ns, estimated=estimated)

    def close(self) -> None:
        """Deliver what nobody waited for."""
        now_ns = self._now_ns()
        for held in self._held:
            held.submit(Due(now_ns, now_ns, TimeSource.NONE))
        self._held.clear()
        self._engine.close()

    def _due(
        self, call: Call, interned: Interned, entry: int, arrival_ns: int, *, is_recorded: bool
    ) -> Due | None:
        """When the call is due, as ``entry`` was or, if that is its own record, is; None if that depends on
        calls to come.

        The times of ``entry`` are those of the last call that was due as it: peers come to what follows
        that after that.
        """
        if entry >= 0:
            self._arrived_ns[entry] = arrival_ns
        if self._timer is not None and entry >= 0 and self._timer.basis(entry) in _TIMED:
            due = self._recorded_due(entry, arrival_ns)
            if due is not None:
                if not is_recorded:
                    due = due._replace(source=TimeSource.ESTIMATED)
                    self.alike += 1
                self.times[due.source] += 1
                self._settle(entry, due.due_ns)
                return due
            if self._exact:
                if not call.is_async:
                    raise TraceIncompleteError(
                        f"The recorded time of {interned.signature.op} (entry {entry}) depends on calls "
                        "that come after it, though the program waits for it: the trace contradicts "
                        "itself. Record again, or ask for --task debug."
                    )
                self.times[self._source] += 1
                return None
        due = self._estimated_due(call, interned, arrival_ns)
        self.times[TimeSource.ESTIMATED] += 1
        if entry >= 0:
            self._settle(entry, due.due_ns)
        return due

    def _estimated_due(self, call: Call, interned: Interned, arrival_ns: int) -> Due:
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
        return Due(due_ns, begin_ns, TimeSource.ESTIMATED)

    def _recorded_due(self, entry: int, arrival_ns: int) -> Due | None:
        assert self._timer is not None
        for anchor in self._timer.anchors(entry):
            if anchor.entry not in (self._due_ns if anchor.completed else self._arrived_ns):
                return None
        due_ns = self._timer.due_ns(entry, arrival_ns, self._due_ns.__getitem__, self._arrived_ns.__getitem__)
        return Due(due_ns, due_ns - self._timer.transfer_ns(entry), self._source)

    def _settle(self, entry: int, due_ns: int) -> None:
        """``entry`` is due at ``due_ns``: calls that were held for it may be due now too."""
        self._due_ns[entry] = due_ns
        progress = bool(self._held)
        while progress:
            progress = False
            for held in list(self._held):
                due = self._recorded_due(held.entry, held.arrival_ns)
                if due is not None:
                    self._held.remove(held)
                    self._due_ns[held.entry] = due.due_ns
                    held.submit(due)
                    progress = True

    def _asynchronous(
        self,
        call: Call,
        subject: Subject,
        fill: Fill,
        entry: int,
        arrival_ns: int,
        due: Due | None,
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

        def submit(due: Due) -> None:
            flight = _Flight(self._engine.submit(due.due_ns, arrive), due, subject)
            self._works[work] = flight
            for tensor in call.outputs:
                self._flight_of_storage[storage_of(tensor)] = flight

        if due is not None:
            submit(due)
        else:
            self._held.append(_Held(entry, arrival_ns, submit))
        if call.operator.name != "recv_any_source_":
            return work
        completion = subject.record.completion if subject.record else None
        source = completion.src_rank if completion else 0

        def finish(_: object) -> int:
            self.before_wait(work)
            work.wait()
            return source

        return AnySourceWork(finish, work.is_completed)
