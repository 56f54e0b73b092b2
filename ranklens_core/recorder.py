"""The recorder: calls through, and keeps what happened.

It never breaks the training it observes: a failure of its own is logged, the trace is marked
incomplete from there, and every later call goes straight to the real operator.
"""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch
from torch._C._distributed_c10d import ProcessGroup, Work

from ranklens_core.c10d.call import Call, Proceed
from ranklens_core.c10d.ops import Kind
from ranklens_core.c10d.signature import Interned, Lane, Signatures
from ranklens_core.c10d.site import thread_place
from ranklens_core.c10d.values import tensor_bytes
from ranklens_core.c10d.work import (
    ORIGINAL_WAIT,
    AnySourceWork,
    CompletionWatcher,
    Handles,
    storage_of,
    wait_for,
)
from ranklens_core.clock import Clock
from ranklens_core.schema import NO_PEER, NO_STEP, CallRow, CompletionRow, Phase, Purpose, WaitRow
from ranklens_core.steps import Steps
from ranklens_core.trace import TraceWriter, content_address

log = logging.getLogger("ranklens")

T = TypeVar("T")


class Values:
    """Whose values are kept, and when: results up to the window's end, inputs inside it.

    Results of the steps before the window are kept too: a replay starts with the program. With
    ``window_only`` they are not: it then starts from a checkpoint. Those of set-up are, which every start
    goes through. ``every_input`` keeps the inputs of calls that carry no floating-point numbers too.
    """

    def __init__(
        self,
        keep: bool,
        window: tuple[int, int | None] | None,
        *,
        window_only: bool = False,
        every_input: bool = False,
    ) -> None:
        self.keep = keep
        self._window_only = window_only
        self._every_input = every_input
        self.first, self.end = window or (NO_FIRST, None)

    def results(self, step: int) -> bool:
        if self._window_only and NO_STEP < step < self.first:
            return False
        return self.keep and (self.end is None or step < self.end)

    def inputs(self, step: int, interned: Interned) -> bool:
        wanted = compared(interned) or (self._every_input and interned.signature.purpose is Purpose.TENSOR)
        return wanted and self.keep and self.first <= step and (self.end is None or step < self.end)


NO_FIRST = -(1 << 62)
"""Below every step number, set-up included."""


class _Thread(threading.local):
    """When the calling thread's previous entry ended, to tell its own compute.

    A thread other than the recorder's has none before its first: its CPU time since it began is
    known, its wall time is not, and taken to be the same.
    """

    exit_ns: int | None = None
    exit_cpu_ns = 0
    exit_delay_ns = 0
    delayed_ns = 0

    def compute(self, now_ns: int, now_cpu_ns: int, now_delay_ns: int) -> tuple[int, int]:
        """Wall and CPU time since the previous entry; adds to ``delayed_ns``."""
        cpu_ns = now_cpu_ns - self.exit_cpu_ns
        self.delayed_ns += now_delay_ns - self.exit_delay_ns
        return (cpu_ns if self.exit_ns is None else now_ns - self.exit_ns), cpu_ns


class Recorder:
    """The ``Handler`` that records one rank into a ``TraceWriter``."""

    def __init__(
        self, writer: TraceWriter, signatures: Signatures, steps: Steps, values: Values, clock: Clock
    ) -> None:
        self._writer = writer
        self._signatures = signatures
        self._steps = steps
        self._values = values
        self._now_ns = clock.now_ns
        self._cpu_ns = clock.thread_cpu_ns
        self._delay_ns = clock.thread_delay_ns
        self._watcher = CompletionWatcher()
        self._handles = Handles()
        self._thread = _Thread()
        self._leave()
        self._lock = threading.Lock()
        self._entries = 0
        self._kinds = 0
        self._seq_ids: dict[Lane, int] = defaultdict(int)
        self._batches: dict[str, list[tuple[int, list[torch.Tensor], torch.device]]] = {}
        self._batch_number = -1
        # of calls whose Work nobody has waited for by wait_tensor: functional collectives, and those
        # whose storage is not yet used again
        self._entry_of_storage: dict[int, int] = {}
        self._waiting: dict[int, int] = {}
        self._failures: dict[int, BaseException] = {}
        self._unseen: dict[int, BaseException] = {}
        self.stopped = False

    def handle(self, call: Call, proceed: Proceed) -> Work | None:
        """Call through and record; see ``Handler``."""
        if self.stopped:
            self._raise_unseen()
            return proceed()
        try:
            entry = self._issue(call)
        except Exception as error:
            self._stop(error)
            return proceed()
        # what runs when the call is done must not hold the call: gloo frees it in a thread of the
        # process group, which cannot end (and join that thread) there
        outputs = call.outputs if self._values.results(self._steps.index) else []
        thread = threading.get_ident()
        self._waiting[thread] = entry
        try:
            self._raise_unseen()
            work = proceed()
            if work is None:
                self._finish(entry, outputs, blocked=True)
                return None
            if call.pg.group_name in self._batches:
                # the batch's own Work tells when this call is done
                self._batches[call.pg.group_name].append((entry, outputs, call.device))
                return work
            if call.operator.name == "recv_any_source_":
                return self._any_source(entry, outputs, work)
            if not call.is_async and call.device_type == "cpu":
                # the caller waits at once anyway: waiting here saves a hop over another thread
                ORIGINAL_WAIT(work)
                self._finish(entry, outputs, blocked=True)
                return work
        except BaseException as error:
            self._finish(entry, outputs, blocked=True, error=error)
            raise
        finally:
            self._waiting.pop(thread, None)

        def done(error: BaseException | None) -> None:
            if error is not None:
                self._keep_failure(entry, error)
            self._finish(entry, outputs, error=error)

        watched = self._watcher.after(work, call.outputs, call.device, done)
        for tensor in call.outputs:
            self._entry_of_storage[storage_of(tensor)] = entry
        self._leave()
        return self._handles.track(watched, entry)

    def activity(self) -> tuple[tuple[int, ...], str]:
        """The entries of the calls that threads are inside of or wait for, and where in the program the main
        thread is."""
        main = threading.main_thread().ident
        return tuple(sorted(set(self._waiting.copy().values()))), thread_place(main or 0)

    def on_wait(self, work: Work, wait: Callable[[], bool]) -> bool:
        """Wait and record it."""
        return self._wait(self._handles.entry_of(work), wait)

    def on_wait_tensor(self, tensor: torch.Tensor, wait: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Wait and record it."""
        return self._wait(self._entry_of_storage.pop(storage_of(tensor), None), wait)

    def _wait(self, call: int | None, wait: Callable[[], T]) -> T:
        if call is None:
            return wait()
        begin_ns, begin_cpu_ns, begin_delay_ns = self._now_ns(), self._cpu_ns(), self._delay_ns()
        thread = threading.get_ident()
        self._waiting[thread] = call
        try:
            result = wait()
            failure = self._failures.get(call)
            if failure is not None:
                self._unseen.pop(call, None)
                raise failure
        finally:
            self._waiting.pop(thread, None)
            if not self.stopped:
                self._record_wait(call, begin_ns, begin_cpu_ns, begin_delay_ns)
        return result

    def _record_wait(self, call: int, begin_ns: int, begin_cpu_ns: int, begin_delay_ns: int) -> None:
        end_ns = self._now_ns()
        compute_ns, compute_cpu_ns = self._thread.compute(begin_ns, begin_cpu_ns, begin_delay_ns)
        with self._lock:
            entry = self._entries
            self._entries += 1
        try:
            self._writer.wait(
                WaitRow(
                    entry=entry,
                    call=call,
                    begin_ns=begin_ns,
                    end_ns=end_ns,
                    compute_ns=compute_ns,
                    compute_cpu_ns=compute_cpu_ns,
                )
            )
        except Exception as error:
            self._stop(error)
        self._leave()

    def start_batch(self, pg: ProcessGroup) -> None:
        """Calls on ``pg`` belong together from here on."""
        self._batch_number += 1
        self._batches[pg.group_name] = []

    def end_batch(self, pg: ProcessGroup, proceed: Proceed) -> Work | None:
        """All calls of the batch complete with the Work of its end."""
        batch = self._batches.pop(pg.group_name, [])
        work = proceed()
        if work is None or not batch or self.stopped:
            return work

        def done(error: BaseException | None) -> None:
            if error is not None:
                self._keep_failure(batch[-1][0], error)
            for entry, outputs, _ in batch:
                self._finish(entry, outputs, error=error)

        tensors = [tensor for _, outputs, _ in batch for tensor in outputs]
        watched = self._watcher.after(work, tensors, batch[0][2], done)
        return self._handles.track(watched, batch[-1][0])

    def _issue(self, call: Call) -> int:
        enqueue_ns = self._now_ns()
        compute_ns, compute_cpu_ns = self._thread.compute(enqueue_ns, self._cpu_ns(), self._delay_ns())
        delayed_ns, self._thread.delayed_ns = self._thread.delayed_ns, 0
        interned = self._signatures.of(call)
        step, phase = self._steps.index, self._steps.phase
        in_addresses: tuple[bytes, ...] = ()
        if call.informative and self._values.inputs(step, interned):
            in_addresses = tuple([content_address(tensor_bytes(t)) for t in call.inputs])
        lane = interned.lane
        with self._lock:
            entry = self._entries
            self._entries += 1
            seq_id = self._seq_ids[lane]
            self._seq_ids[lane] += 1
        self._writer.call(
            CallRow(
                entry=entry,
                signature=interned.id,
                seq_id=seq_id,
                step=step,
                phase=phase,
                training=phase is Phase.STEP and compared(interned),
                batch=self._batch_number if call.pg.group_name in self._batches else -1,
                enqueue_ns=enqueue_ns,
                start_ns=self._now_ns(),
                compute_ns=compute_ns,
                compute_cpu_ns=compute_cpu_ns,
                delayed_ns=delayed_ns,
                in_addresses=in_addresses,
            ),
            is_new=interned.id >= self._kinds,
        )
        self._kinds = max(self._kinds, interned.id + 1)
        return entry

    def _finish(
        self,
        entry: int,
        outputs: list[torch.Tensor],
        *,
        blocked: bool = False,
        error: BaseException | None = None,
        src_rank: int = NO_PEER,
    ) -> None:
        """The call is over: keep its results before the program can touch them.

        ``outputs`` are those to keep, by the step that the call was issued in.
        """
        end_ns = self._now_ns()
        if self.stopped:
            return
        try:
            out_addresses: list[bytes] = []
            if error is None:
                for tensor in outputs:
                    data = tensor_bytes(tensor)
                    address = content_address(data)
                    if not self._writer.has(address):
                        self._writer.store(address, data)
                    out_addresses.append(address)
            self._writer.completion(
                CompletionRow(
                    entry=entry,
                    end_ns=end_ns,
                    return_ns=self._now_ns() if blocked else 0,
                    src_rank=src_rank,
                    out_addresses=tuple(out_addresses),
                    error="" if error is None else f"{type(error).__name__}: {error}",
                )
            )
        except Exception as failure:
            self._stop(failure)
        if blocked:
            self._leave()

    def _any_source(self, entry: int, outputs: list[torch.Tensor], work: Work) -> Work:
        def finish(timeout: timedelta) -> int:
            try:
                wait_for(work, timeout)
            except BaseException as error:
                self._finish(entry, outputs, blocked=True, error=error)
                raise
            source: int = work._source_rank()
            self._finish(entry, outputs, blocked=True, src_rank=source)
            return source

        return self._handles.track(AnySourceWork(finish, work.is_completed), entry)

    def _keep_failure(self, entry: int, error: BaseException) -> None:
        """An asynchronous call failed: whoever waits for it must be told."""
        self._failures[entry] = self._unseen[entry] = error

    def _raise_unseen(self) -> None:
        """Raise the error of a call whose Work nobody can wait for through us.

        Waits inside torch's C++ (DDP's broadcasts) pass by ``on_wait``, and a Work made from a future
        does not raise there: the program would go on with what is no result.
        """
        if not self._unseen:
            return
        self._handles.release()
        for entry, error in list(self._unseen.items()):
            if not self._handles.is_held(entry):
                del self._unseen[entry]
                raise error

    def _leave(self) -> None:
        thread = self._thread
        thread.exit_cpu_ns, thread.exit_delay_ns = self._cpu_ns(), self._delay_ns()
        thread.exit_ns = self._now_ns()

    def _stop(self, error: Exception) -> None:
        """Step aside for good: the training goes on unrecorded."""
        self.stopped = True
        log.exception("RankLens stopped recording, the training goes on: %s", error)
        self._writer.fail(f"recorder: {type(error).__name__}: {error}")


def compared(interned: Interned) -> bool:
    """Whether a call's inputs can be compared and scored: floating-point tensors of the training,
    not objects, timers or barriers, whose bytes differ from run to run."""
    return interned.floating and interned.signature.purpose is Purpose.TENSOR


__all__ = ["Kind", "Recorder", "Values", "compared"]
