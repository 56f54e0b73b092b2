"""The replayer: finds each call's record and answers it alone.

Calls are matched in issue order within each group (point-to-point: each peer), never across
groups. A call that is not the recorded one is an error or a labelled value, as the task says.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial

import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroup, Work

from ranklens_core.c10d.call import Call, Proceed
from ranklens_core.c10d.ops import Returns
from ranklens_core.c10d.signature import Interned, Lane, Signatures, lane_of
from ranklens_core.c10d.synthesise import Synthesiser
from ranklens_core.c10d.values import tensor_bytes, write_bytes
from ranklens_core.c10d.work import AnySourceWork, completed_work, failed_work
from ranklens_core.check.structure import Mismatch, describe, explain, structure_of
from ranklens_core.check.values import ValueScore
from ranklens_core.errors import (
    RankLensError,
    StructureMismatchError,
    TraceIncompleteError,
    ValuesMissingError,
)
from ranklens_core.schema import CallRecord, GroupRecord
from ranklens_core.steps import Steps
from ranklens_core.task import OnMismatch, Result, Task
from ranklens_core.trace import RankTrace, content_address


class WindowEnded(SystemExit):
    """The recorded window is over: the program ends here, with success."""


class _Sequence:
    """The records of one lane and how far the program has come."""

    __slots__ = ("at", "records", "structures")

    def __init__(self) -> None:
        self.records: list[CallRecord] = []
        self.structures: list[int] = []
        self.at = 0


class Replayer:
    """The ``Handler`` that stands in for all peers of one rank.

    ``groups`` maps group keys to records (with roles) for messages; ``on_mismatch`` overrides the
    task's. Raises, from within the program's call, ``StructureMismatchError``,
    ``TraceIncompleteError`` and ``ValuesMissingError``; the first one is kept in ``fatal``, and
    raised again at every later call in case the program swallowed it.
    """

    def __init__(
        self,
        trace: RankTrace,
        task: Task,
        on_mismatch: OnMismatch,
        signatures: Signatures,
        steps: Steps,
        groups: Mapping[str, GroupRecord],
    ) -> None:
        self._trace = trace
        self._task = task
        self._on_mismatch = on_mismatch
        self._signatures = signatures
        self._steps = steps
        self._groups = groups
        self._synthesiser = Synthesiser()
        self._failures: weakref.WeakKeyDictionary[Work, Exception] = weakref.WeakKeyDictionary()
        self._last = threading.local()
        self._lock = threading.Lock()
        self._structures: dict[tuple[object, ...], int] = {}
        self._live_structures: dict[int, int] = {}
        self._lanes: dict[Lane, _Sequence] = {}
        self.scores = ValueScore()
        self.provenance: Counter[str] = Counter()
        self.replayed = 0
        self.matched = 0
        self.training_matched = 0
        self.total = 0
        self.training_total = 0
        self.first_mismatch: Mismatch | None = None
        self.fatal: RankLensError | None = None
        self._load()

    def handle(self, call: Call, proceed: Proceed) -> Work | None:
        """Answer ``call`` from the trace; ``proceed`` is never used: there is nobody to talk to."""
        if self.fatal is not None:
            raise self.fatal
        interned = self._signatures.of(call)
        with self._lock:
            record, seq_id = self._match(interned)
            self.replayed += 1
        if record is None:
            self._synthesise(call)
            return self._answer(call, None)
        if self._task.compares:
            self._compare(call, interned, record, seq_id)
        if self._task.result is Result.SYNTHESISED:
            self._synthesise(call)
        elif self._was_survived(record):
            return self._fail_as_recorded(call, record)
        else:
            self._restore(call, interned, record, seq_id)
        return self._answer(call, record)

    def on_wait(self, work: Work, wait: Callable[[], bool]) -> bool:
        """Results are there when the call returns; so are the failures that were recorded."""
        result = wait()
        failure = self._failures.get(work)
        if failure is not None:
            raise failure
        return result

    def start_batch(self, pg: ProcessGroup) -> None:
        """Batches need no care: each of their calls completes by itself."""

    def end_batch(self, pg: ProcessGroup, proceed: Proceed) -> Work | None:
        """The Work of a batch whose calls are all complete."""
        work = proceed()
        return work if work is not None else completed_work([], pg._device_types[0])

    def missing(self) -> str:
        """The first recorded call that the program never made, in words; ``""`` if it made all."""
        waiting = [lane for lane in self._lanes.values() if lane.at < len(lane.records)]
        if not waiting:
            return ""
        first = min((lane.records[lane.at] for lane in waiting), key=lambda record: record.row.entry)
        left = sum(len(lane.records) - lane.at for lane in waiting)
        site = first.signature.program_site or first.signature.site
        return (
            f"the program ended {left} calls early; the first one it did not make is "
            f"{describe(first.signature, self._groups.get(first.signature.group))} "
            f"(recorded at {site or 'an unknown place'})"
        )

    def _load(self) -> None:
        record = self._trace.record
        self._window_end = record.value_steps[1] if record.value_steps else None
        finished = len(record.steps)
        by_signature: dict[int, tuple[Lane, int]] = {}
        for call in self._trace.call_records():
            known = by_signature.get(call.row.signature)
            if known is None:
                structure = self._intern(structure_of(call.signature))
                known = by_signature[call.row.signature] = (lane_of(call.signature), structure)
            sequence = self._lanes.setdefault(known[0], _Sequence())
            sequence.records.append(call)
            sequence.structures.append(known[1])
            if not self._is_past_window(call):
                self.total += 1
                self.training_total += is_training(call, finished, record.complete)
        self._finished = finished
        self._complete = record.complete

    def _is_past_window(self, record: CallRecord) -> bool:
        return (
            self._window_end is not None
            and record.row.step >= self._window_end
            and self._task.result is Result.RECORDED
        )

    def _intern(self, structure: tuple[object, ...]) -> int:
        return self._structures.setdefault(structure, len(self._structures))

    def _match(self, interned: Interned) -> tuple[CallRecord | None, int]:
        """The record of the call being made, None if a mismatch is to be answered by synthesis."""
        sequence = self._lanes.get(interned.lane)
        if sequence is None:
            sequence = self._lanes[interned.lane] = _Sequence()
        at = sequence.at
        if at < len(sequence.records):
            record = sequence.records[at]
            if self._is_past_window(record):
                raise WindowEnded(0)
            structure = self._live_structures.get(interned.id)
            if structure is None:
                structure = self._live_structures[interned.id] = self._intern(
                    structure_of(interned.signature)
                )
            if structure == sequence.structures[at]:
                sequence.at = at + 1
                self.matched += 1
                self.training_matched += is_training(record, self._finished, self._complete)
                return record, at
            recorded: CallRecord | None = record
        else:
            recorded = None
            if not self._complete and sequence.records:
                self._fail(self._ended(interned))
        self._mismatch(interned, sequence, recorded, at)
        # keep the sequence aligned: this call took the record's place
        sequence.at = min(at + 1, len(sequence.records))
        return None, at

    def _mismatch(
        self, interned: Interned, sequence: _Sequence, recorded: CallRecord | None, at: int
    ) -> None:
        if not self._complete and recorded is None:
            self._fail(self._ended(interned))
        structure = self._intern(structure_of(interned.signature))
        nearest = ""
        places = [i for i, other in enumerate(sequence.structures) if other == structure]
        if places:
            place = min(places, key=lambda i: abs(i - at))
            found = sequence.records[place]
            nearest = (
                f"the same call stands at place {place} of this sequence (this is place {at}), "
                f"step {found.row.step}, {found.signature.program_site or found.signature.site}"
            )
        mismatch = explain(
            now=interned.signature,
            group=self._groups.get(interned.signature.group),
            seq_id=at,
            step=self._steps.index,
            recorded=recorded.signature if recorded else None,
            nearest=nearest,
            ended=self._why_no_record(interned, sequence),
        )
        if self.first_mismatch is None:
            self.first_mismatch = mismatch
        if self._on_mismatch is OnMismatch.STOP:
            self._fail(StructureMismatchError(mismatch.text))

    def _why_no_record(self, interned: Interned, sequence: _Sequence) -> str:
        if sequence.records:
            return f"no more calls: this sequence has {len(sequence.records)}"
        group = interned.signature.group
        if group not in self._groups:
            known = ", ".join(
                f"{record.role or record.pg_desc} {key}" for key, record in self._groups.items()
            )
            return f"no group of ranks {group}; this rank's groups: {known}"
        return "no call of this kind on this group"

    def _ended(self, interned: Interned) -> TraceIncompleteError:
        record = self._trace.record
        why = record.failure or f"rank {record.rank} ended without closing its trace"
        return TraceIncompleteError(
            f"The recording ends here, after {self.matched} calls of rank {record.rank} ({why}): "
            f"nothing is recorded for {describe(interned.signature)}."
        )

    def _compare(self, call: Call, interned: Interned, record: CallRecord, seq_id: int) -> None:
        if not record.row.in_addresses or not is_training(record, self._finished, self._complete):
            return
        now = tuple([content_address(tensor_bytes(tensor)) for tensor in call.inputs])
        if now != record.row.in_addresses:
            self.scores.compare(
                record.row.in_addresses,
                now,
                signature=interned.signature,
                recorded_signature=record.signature,
                group=self._groups.get(interned.signature.group),
                seq_id=seq_id,
                step=record.row.step,
            )
        else:
            self.scores.compared += 1
            self.scores.identical += 1

    def _restore(self, call: Call, interned: Interned, record: CallRecord, seq_id: int) -> None:
        completion = record.completion
        if completion is None or completion.error:
            error = completion.error if completion else "it never completed"
            self._fail(
                TraceIncompleteError(
                    f"The recording ends here, after {self.matched - 1} calls of rank {record.rank}: "
                    f"{describe(record.signature)} was issued but did not finish ({error})."
                )
            )
        assert completion is not None
        if len(completion.out_addresses) != len(call.outputs):
            self._fail(
                ValuesMissingError(
                    f"Rank {record.rank} was recorded without values: there is nothing to restore for "
                    f"{describe(record.signature)}. Record again with --payload {record.rank}, or ask "
                    "for --task structure."
                )
            )
        try:
            for tensor, address in zip(call.outputs, completion.out_addresses, strict=True):
                write_bytes(tensor, self._trace.payload(address))
        except RankLensError as error:
            self._fail(error)
        self.provenance[Result.RECORDED] += 1

    def _was_survived(self, record: CallRecord) -> bool:
        """Whether the call failed and the program coped: it came to a good end all the same."""
        failed = record.completion is not None and bool(record.completion.error)
        return failed and self._trace.record.exit_status == 0

    def _fail_as_recorded(self, call: Call, record: CallRecord) -> Work | None:
        """Fail where the recorded call did: at once, or in its Work."""
        assert record.completion is not None
        error = recorded_error(record.completion.error)
        self.provenance[Result.RECORDED] += 1
        if record.completion.return_ns:
            raise error
        if call.operator.name == "recv_any_source_":
            return self._hold(AnySourceWork(partial(_raise, error), lambda: True))
        work = self._hold(failed_work(error, call.device))
        self._failures[work] = error
        return work

    def _hold(self, work: Work) -> Work:
        """Keep ``work`` until the thread's next call, by when its caller has it."""
        self._last.work = work
        return work

    def _synthesise(self, call: Call) -> None:
        self._synthesiser.fill(call)
        self.provenance[Result.SYNTHESISED] += 1

    def _answer(self, call: Call, record: CallRecord | None) -> Work | None:
        if call.operator.returns is Returns.NOTHING:
            return None
        if call.operator.name == "recv_any_source_":
            source = record.completion.src_rank if record and record.completion else 0
            return self._hold(AnySourceWork(lambda _: source, lambda: True))
        return completed_work(call.outputs, call.device)

    def _fail(self, error: RankLensError) -> None:
        self.fatal = error
        raise error


RECORDED_ERRORS: dict[str, type[Exception]] = {
    error.__name__: error
    for error in (
        ValueError,
        TypeError,
        IndexError,
        NotImplementedError,
        dist.DistError,
        dist.DistBackendError,
        dist.DistNetworkError,
        dist.DistStoreError,
    )
}
"""What torch's collectives raise, by the name in the trace; anything else becomes a RuntimeError."""


def recorded_error(text: str) -> Exception:
    """The exception that ``CompletionRow.error`` (``Type: message``) tells of."""
    name, _, message = text.partition(": ")
    return RECORDED_ERRORS.get(name, RuntimeError)(message)


def _raise(error: Exception, timeout: timedelta) -> int:
    raise error


def is_training(record: CallRecord, finished_steps: int, complete: bool) -> bool:
    """Whether a call is scored: it was flagged and its step came to its end (what follows the last
    step of a finished run is no training; in a killed one it is)."""
    return record.row.training and (not complete or record.row.step < finished_steps)
