"""The writer of one rank's trace: producers append to a queue, one thread writes it to disk.

Producers are the training's own threads, so what they call is cheap, never raises, and drops
nothing: where the disk is slower than the training, they wait once too much is queued.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path

import msgspec

from ranklens_core.clock import Clock, MonotonicClock
from ranklens_core.schema import (
    CallRow,
    CompletionRow,
    EnvironmentItem,
    GroupRecord,
    Printed,
    RunRecord,
    Signature,
    Step,
    WaitRow,
)
from ranklens_core.trace.files import Data, Opener, open_new
from ranklens_core.trace.layout import rank_directory
from ranklens_core.trace.lines import (
    AliveLine,
    EndLine,
    EnvironmentLine,
    FailureLine,
    GroupLine,
    HeaderLine,
    Line,
    MeetingLine,
    PrintedLine,
    RankHeader,
    RoleLine,
    StepLine,
)
from ranklens_core.trace.rankfiles import RankFiles, Row
from ranklens_core.trace.staging import Staged, Staging, held_bytes

logger = logging.getLogger("ranklens.trace")

FLUSH_ROWS = 4096
"""Rows that make a flush due before its time; also how often producers look at the queue."""

FLUSH_INTERVAL_S = 0.25
"""How old a record can get before it is on disk."""

HURRY_NS = 50_000_000
"""How soon after a flush one is made for a new kind of call: a program whose calls are all new is not
slowed."""

HURRY_ALLOWANCE_NS, HURRY_SHARE = 200_000_000, 100
"""Time that a rank may wait for such flushes: so much, and a hundredth of the time that it runs."""

HURRY_WAIT_S = 0.05
"""The longest wait for one of them."""

ALIVE_INTERVAL_NS = 500_000_000
"""After so long without a record, and again and again, the journal says what the rank waits for."""

MAX_PENDING_ITEMS = 32 * FLUSH_ROWS
"""Items queued before producers wait: about 100 MB of rows at most."""

WAKE_AT_BYTES = 1 << 20
"""Queued values that wake the writer at once; less waits for the next flush."""


class _Value(msgspec.Struct, frozen=True):
    address: bytes
    data: Staged


_Item = Row | Line | _Value

Activity = tuple[tuple[int, ...], str]
"""``waiting`` and ``place`` of an ``AliveLine``."""


class TraceWriter:
    """Writes one rank's part of a trace. Safe to call from several threads.

    A forked child has no part in it: there every method does nothing.

    ``rank`` is the global rank. ``failure`` is "" or why writing stopped (disk full, ...). From
    then on every method does nothing and nobody waits. The failure is logged and, where that is
    possible, in the journal.
    """

    def __init__(
        self,
        directory: Path,
        run: RunRecord,
        header: RankHeader,
        *,
        clock: Clock | None = None,
        max_pending_bytes: int = 256 << 20,
        flush_interval_s: float = FLUSH_INTERVAL_S,
        opener: Opener = open_new,
    ) -> None:
        """Start writing ``directory/rank-NNNNN``, which must be empty or not there.

        ``max_pending_bytes`` bounds the memory of values that are queued: past it, ``store`` waits.
        A kill -9 loses at most what was recorded in the last ``flush_interval_s`` seconds (and while the last
        flush was being written).
        Never raises OSError: where the files cannot be made, ``failure`` says why.
        """
        self.failure = ""
        self._clock = clock if clock is not None else MonotonicClock()
        self._max_pending_bytes = max_pending_bytes
        self._flush_interval_ns = int(flush_interval_s * 1e9)
        self._flushed_ns = self._spoke_ns = self._clock.now_ns()
        self._began_ns, self._hurried_ns, self._hurry = self._flushed_ns, 0, False
        self._activity: Callable[[], Activity] | None = None
        self.rank = header.rank
        self._pid = os.getpid()
        self._queue: deque[_Item] = deque()
        self._changed = threading.Condition()
        self._stored: set[bytes] = set()
        self._staging = Staging(max_pending_bytes)
        self._pending_bytes = 0
        self._signature_count = 0
        self._flushes_asked = 0
        self._flushes_done = 0
        self._wake_asked = False
        self._end: EndLine | FailureLine | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._write, name="ranklens-trace-writer", daemon=True)
        path = directory / rank_directory(header.rank)
        try:
            self._files = RankFiles(path, HeaderLine(run=run, header=header), opener)
        except OSError as error:
            self._give_up(f"{path}: {error}")
            return
        self._thread.start()

    # Rows: the hot path.

    def call(self, row: CallRow, *, is_new: bool = False) -> None:
        """Record a call that was issued.

        With ``is_new`` it is on disk when this returns, if the disk is quick: a kind of call that was never
        made before is the likeliest to abort the process, and that call is what the trace is then read for.
        """
        self._put(row)
        if is_new and not self._is_off():
            self._hurry_up()

    def completion(self, row: CompletionRow) -> None:
        """Record the end of a call. Its results must have been stored before."""
        self._put(row)

    def wait(self, row: WaitRow) -> None:
        """Record a wait that ended."""
        self._put(row)

    def signature(self, signature: Signature) -> int:
        """Record a signature not seen before; its number, to be used in ``CallRow.signature``."""
        if self._is_off():
            return self._signature_count
        with self._changed:
            number = self._signature_count
            self._signature_count += 1
            self._put(signature)
        return number

    # Values.

    def has(self, address: bytes) -> bool:
        """Whether the value at ``address`` need not be stored (again)."""
        return address in self._stored or self._is_off()

    def store(self, address: bytes, data: Data) -> None:
        """Keep a value under its ``content_address``, once.

        ``data`` (C-contiguous) is copied before this returns. Waits while
        more than ``max_pending_bytes`` are queued.
        """
        if self._is_off():
            return
        room_bytes = held_bytes(memoryview(data).nbytes)
        with self._changed:
            self._changed.wait_for(lambda: self._has_room(room_bytes))
            if self._is_off() or address in self._stored:
                return
            staged = self._staging.copy(data)
            self._pending_bytes += staged.held_bytes
            self._queue.append(_Value(address, staged))
            self._stored.add(address)  # last: who sees it may refer to it
            if self._pending_bytes >= WAKE_AT_BYTES:
                self._wake()

    # Lines of the journal.

    def meeting(self, meeting_id: str) -> None:
        """Record the id that the ranks of the job agreed on."""
        self._put(MeetingLine(id=meeting_id))

    def group(self, group: GroupRecord) -> None:
        """Record a group that was made."""
        self._put(GroupLine(group=group))

    def role(self, key: str, role: str) -> None:
        """Record what the group ``key`` is used for; replaces an earlier role."""
        self._put(RoleLine(key=key, role=role))

    def step(self, step: Step) -> None:
        """Record a step that ended."""
        self._put(StepLine(step=step))

    def environment(self, item: EnvironmentItem) -> None:
        """Record a fact about where the program runs."""
        self._put(EnvironmentLine(item=item))

    def printed(self, item: Printed) -> None:
        """Record a metric that the program printed."""
        self._put(PrintedLine(item=item))

    # Life.

    def watch(self, activity: Callable[[], Activity]) -> None:
        """While nothing is recorded, write down now and then what ``activity()`` says of the program."""
        self._activity = activity

    def flush(self, timeout_s: float | None = None) -> None:
        """Return once all that was recorded before is on disk, or writing has failed, or at the latest after
        ``timeout_s``."""
        if self._is_off():
            return
        with self._changed:
            self._flushes_asked += 1
            asked = self._flushes_asked
            self._wake()
            self._changed.wait_for(lambda: self._flushes_done >= asked or self._is_off(), timeout_s)

    def close(self, exit_status: int | None, error: str = "", error_site: str = "") -> None:
        """Write all that is left, mark the rank complete, end the thread. Later calls do nothing.

        ``error`` and ``error_site`` as in ``EndLine``.
        """
        now_ns = self._clock.now_ns()
        self._finish(EndLine(time_ns=now_ns, exit_status=exit_status, error=error, error_site=error_site))
        if self._thread.is_alive() and os.getpid() == self._pid:
            self._thread.join()

    def fail(self, reason: str) -> None:
        """Stop recording because of ``reason``; what was recorded before is still written.

        Does not wait for that: ``close`` does.
        """
        self._finish(FailureLine(time_ns=self._clock.now_ns(), text=reason))

    def _finish(self, end: EndLine | FailureLine) -> None:
        if self._is_off():
            return
        with self._changed:
            self._end = end
            if isinstance(end, FailureLine):
                self.failure = end.text
            self._wake()

    # Producers' side.

    def _is_off(self) -> bool:
        return bool(self.failure) or self._closed or os.getpid() != self._pid

    def _put(self, item: _Item) -> None:
        if self._is_off():
            return
        queue = self._queue
        queue.append(item)
        if len(queue) % FLUSH_ROWS == 0:
            self._wake_and_wait()

    def _hurry_up(self) -> None:
        """Flush, as long as all such flushes together cost next to nothing; else have one soon."""
        began_ns = self._clock.now_ns()
        allowed_ns = HURRY_ALLOWANCE_NS + (began_ns - self._began_ns) // HURRY_SHARE
        if self._hurried_ns < allowed_ns:
            self.flush(HURRY_WAIT_S)
            self._hurried_ns += self._clock.now_ns() - began_ns
        else:
            with self._changed:
                self._hurry = True
                self._wake()  # it flushes now, or sleeps until it may

    def _wake(self) -> None:
        self._wake_asked = True
        self._changed.notify_all()

    def _wake_and_wait(self) -> None:
        """Wake the writer; wait for it if it is far behind."""
        with self._changed:
            self._wake()
            self._changed.wait_for(lambda: len(self._queue) < MAX_PENDING_ITEMS or self._is_off())

    def _has_room(self, wanted_bytes: int) -> bool:
        """Room for ``wanted_bytes``; a value larger than all the room goes through alone."""
        pending = self._pending_bytes
        return not pending or pending + wanted_bytes <= self._max_pending_bytes or self._is_off()

    # The writer thread's side.

    def _write(self) -> None:
        try:
            while not self._closed:
                self._write_once()
        except Exception as error:  # whatever it is, the training must go on
            self._fail(f"{type(error).__name__}: {error}")

    def _write_once(self) -> None:
        """Wait for work, write what is queued, and flush if that is due."""
        with self._changed:
            # woken for other reasons, it must not wait a whole interval again
            due_in_ns = self._flushed_ns + self._due_after_ns() - self._clock.now_ns()
            self._changed.wait_for(lambda: self._wake_asked, timeout=max(0, due_in_ns) / 1e9)
            self._wake_asked = False
            end, asked = self._end, self._flushes_asked
        for _ in range(len(self._queue)):
            self._write_item(self._queue.popleft())
            if self._files.row_count >= FLUSH_ROWS:
                self._flush()
        now_ns = self._clock.now_ns()
        if end is not None or asked > self._flushes_done or now_ns - self._flushed_ns >= self._due_after_ns():
            self._flush()
        if end is not None:
            self._files.finish(now_ns)
            self._files.line(end)
            self._files.close()
        with self._changed:
            self._flushes_done = asked
            self._closed = end is not None
            self._changed.notify_all()

    def _due_after_ns(self) -> int:
        """How long after the last flush the next is due."""
        return min(HURRY_NS, self._flush_interval_ns) if self._hurry else self._flush_interval_ns

    def _write_item(self, item: _Item) -> None:
        if isinstance(item, _Value):
            self._files.value(item.address, item.data)
            with self._changed:
                self._pending_bytes -= item.data.held_bytes
                self._staging.release(item.data)
                self._changed.notify_all()
        elif isinstance(item, Row):
            self._files.row(item)
        else:
            self._files.line(item)

    def _flush(self) -> None:
        self._flushed_ns, self._hurry = self._clock.now_ns(), False
        if self._files.flush(self._flushed_ns):
            self._spoke_ns = self._flushed_ns
        elif self._activity is not None and self._flushed_ns - self._spoke_ns >= ALIVE_INTERVAL_NS:
            waiting, place = self._activity()
            self._files.line(AliveLine(time_ns=self._flushed_ns, waiting=waiting, place=place))
            self._spoke_ns = self._flushed_ns

    def _fail(self, reason: str) -> None:
        """Stop writing, and say so in the journal if that is possible."""
        self._give_up(reason)
        try:
            try:
                self._files.line(FailureLine(time_ns=self._clock.now_ns(), text=reason))
            finally:
                self._files.close()
        except OSError as error:
            logger.error("rank %d: the journal does not say so: %s", self.rank, error)

    def _give_up(self, reason: str) -> None:
        """From now on every method does nothing; whoever waits goes on."""
        logger.error(
            "rank %d: recording stopped: %s. The program goes on; its trace ends here.", self.rank, reason
        )
        with self._changed:
            self.failure = reason
            self._queue.clear()
            self._changed.notify_all()
