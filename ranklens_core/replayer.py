"""The replayer: answers each call of one rank alone.

With a trace a call is matched with its record; a call that is not the recorded one is an error or a
labelled value, as the task says. Without one (emulation) every result is synthesised.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping

import torch
from torch._C._distributed_c10d import ProcessGroup, Work

from ranklens_core.c10d.call import Call, Proceed
from ranklens_core.c10d.ops import Kind
from ranklens_core.c10d.signature import Interned, Signatures, located
from ranklens_core.c10d.site import Sites
from ranklens_core.c10d.synthesise import Synthesiser
from ranklens_core.c10d.values import tensor_bytes, write_bytes
from ranklens_core.c10d.work import FINISHED, Handles
from ranklens_core.check.structure import describe
from ranklens_core.check.values import ValueScore
from ranklens_core.delivery import AtOnce, Delivery, Fill
from ranklens_core.errors import RankLensError, TraceIncompleteError, UnsupportedError, ValuesMissingError
from ranklens_core.matching import Match, Matcher
from ranklens_core.recorded_failure import RecordedFailures, was_survived
from ranklens_core.schema import CallRecord, GroupRecord, Phase, Purpose
from ranklens_core.steps import Steps
from ranklens_core.task import Result, Task
from ranklens_core.trace import RankTrace, content_address
from ranklens_core.trace.problem import damaged


class Replayer:
    """The ``Handler`` that stands in for all peers of one rank.

    ``trace`` and ``matcher`` are None when nothing was recorded. ``groups`` maps group keys to records
    (with roles) for messages. Raises, from within the program's call, what ``Matcher.match`` does,
    and ``ValuesMissingError``; the first error is kept in ``fatal``, and raised again at every later
    call in case the program swallowed it. With ``on_restored`` recorded values are let go of as soon as they
    are restored, and it is told how many bytes they were.
    """

    def __init__(
        self,
        trace: RankTrace | None,
        matcher: Matcher | None,
        task: Task,
        signatures: Signatures,
        sites: Sites,
        steps: Steps,
        groups: Mapping[str, GroupRecord],
        synthesiser: Synthesiser,
        delivery: Delivery | None = None,
        on_restored: Callable[[int], None] | None = None,
    ) -> None:
        self._trace = trace
        self._matcher = matcher
        self._task = task
        self._restores = task.result is Result.RECORDED
        self._signatures = signatures
        self._sites = sites
        self._steps = steps
        self._groups = groups
        self.delivery = delivery or AtOnce()
        self._on_restored = on_restored
        self.synthesiser = synthesiser
        self._handles = Handles()
        self._batches: dict[ProcessGroup, list[tuple[Work, torch.device]]] = {}
        self._failures = RecordedFailures()
        self._lock = threading.Lock()
        self.scores = ValueScore()
        self.provenance: Counter[str] = Counter()
        self.guessed = ""
        """Which integers or objects were made up first that a program may fail over."""
        self.replayed = 0
        self.fatal: RankLensError | None = None

    @property
    def step(self) -> int:
        """The step the program is in."""
        return self._steps.index

    def handle(self, call: Call, proceed: Proceed) -> Work | None:
        """Answer ``call``; ``proceed`` is never used: there is nobody to talk to."""
        if self.fatal is not None:
            raise self.fatal
        entered_ns = self.delivery.enter()
        try:
            interned, match = self._find(call)
            record = match.record
            fill = self._filling(call, record)
        except RankLensError as error:
            self.fatal = error
            raise
        if record is not None and fill is None:
            return self._handles.track(self._failures.fail(call, record), self.replayed)
        assert fill is not None
        work = self.delivery.deliver(call, interned, record, fill, entered_ns, match.alike)
        if work is None or work is FINISHED:
            return work
        batch = self._batches.get(call.pg)
        if batch is not None:
            batch.append((work, call.device))
        return self._handles.track(work, self.replayed)

    def on_wait(self, work: Work, wait: Callable[[], bool]) -> bool:
        """The Work knows when its result arrives; a recorded failure must be raised here."""
        failure = self._failures.of(work)
        if failure is not None:
            raise failure
        self.delivery.before_wait(work)
        return wait()

    def on_wait_tensor(self, tensor: torch.Tensor, wait: Callable[[], torch.Tensor]) -> torch.Tensor:
        """As ``on_wait``."""
        failure = self._failures.of_tensor(tensor)
        if failure is not None:
            raise failure
        self.delivery.before_wait_tensor(tensor)
        return wait()

    def start_batch(self, pg: ProcessGroup) -> None:
        """The Works of the calls up to ``end_batch`` go nowhere: the batch's own stands for them."""
        self._batches[pg] = []

    def end_batch(self, pg: ProcessGroup, proceed: Proceed) -> Work | None:
        """A Work that is complete when all calls of the batch are."""
        proceed()
        batch = self._batches.pop(pg, [])
        device = batch[-1][1] if batch else torch.device("cpu")
        return self.delivery.batch([work for work, _ in batch], device)

    def _find(self, call: Call) -> tuple[Interned, Match]:
        """The call's record, its inputs compared."""
        interned = self._signatures.of(call)
        with self._lock:
            match = self._matcher.match(interned, self._steps.index) if self._matcher else Match(None, 0)
            self.replayed += 1
        if match.record is not None and self._task.compares:
            self._compare(call, interned, match.record, match.seq_id)
        return interned, match

    def _filling(self, call: Call, record: CallRecord | None) -> Fill | None:
        """What writes the call's outputs; None where it failed when it was recorded."""
        if record is None or not self._restores or self._lacks_values(call, record):
            self.provenance[Result.SYNTHESISED] += 1
            self._check_knowable(call)
            return self.synthesiser.filling(call, set_up=self._steps.phase is Phase.SETUP)
        assert self._trace is not None
        if call.operator.kind is Kind.SEND and self._task.falls_back:
            self.synthesiser.peers.note_sent(call)  # a message to come may have to be made up
        self.provenance[Result.RECORDED] += 1
        if was_survived(record, self._trace.record):
            return None
        return self._restoring(call, record)

    def _check_knowable(self, call: Call) -> None:
        """Raise UnsupportedError for a result that cannot be made up; remember one that is a guess."""
        guesses = self.synthesiser.guesses(call)
        pickled = bool(call.outputs) and call.outputs[0].dtype is torch.uint8
        if not guesses and not pickled:
            return
        site = self._sites.find()
        place = f"{call.operator.op} at {site.program_site or site.site}"
        is_object = site.purpose is Purpose.OBJECT
        if not guesses:
            if is_object:  # gathered: each peer's is this rank's own
                self.guessed = self.guessed or f"the objects of {place}"
            return
        if is_object or self.synthesiser.cannot_know(call):
            raise UnsupportedError(
                f"{place} receives {'an object' if is_object else 'integers'} that another rank alone knows, "
                "and nothing was recorded. Record the job, at a small size if need be (ranklens record "
                "--nproc N), and replay a rank of that; or emulate the rank that sends it."
            )
        self.guessed = self.guessed or f"the integers of {place}"

    def _lacks_values(self, call: Call, record: CallRecord) -> bool:
        """Whether the task takes other results than the recorded ones, and these were not kept (the call
        ended well) or are lost (the recording broke off, and the program goes on past that)."""
        assert self._trace is not None
        completion = record.completion
        if self._matcher is not None and self._matcher.is_set_up(self._steps.index):
            return completion is None or len(completion.out_addresses) != len(call.outputs)
        if not self._task.falls_back:
            return False
        if completion is None or completion.error:
            goes_on = self._matcher is not None and self._matcher.realigns
            return goes_on and not was_survived(record, self._trace.record)
        return len(completion.out_addresses) != len(call.outputs)

    def _compare(self, call: Call, interned: Interned, record: CallRecord, seq_id: int) -> None:
        assert self._matcher is not None
        if not record.row.in_addresses or not (self._task.compares_all or self._matcher.is_training(record)):
            return
        now = tuple([content_address(tensor_bytes(tensor)) for tensor in call.inputs])
        if now == record.row.in_addresses:
            self.scores.agreed()
            return
        self.scores.differed(
            record.row.in_addresses,
            now,
            signature=located(interned.signature, self._sites),
            recorded_signature=record.signature,
            group=self._groups.get(interned.signature.group),
            seq_id=seq_id,
            step=record.row.step,
        )

    def _restoring(self, call: Call, record: CallRecord) -> Fill:
        """What writes the recorded results; everything that can be missing is found missing now."""
        assert self._trace is not None
        trace, completion = self._trace, record.completion
        if completion is None or completion.error:
            error = completion.error if completion else "it never completed"
            raise TraceIncompleteError(
                f"The recording ends here: {describe(record.signature)} of rank {record.rank} was issued "
                f"but did not finish ({error})."
            )
        if len(completion.out_addresses) != len(call.outputs):
            if trace.record.window_only and trace.record.value_steps:
                first = trace.record.value_steps[0]
                raise ValuesMissingError(
                    f"The results of the steps before {first} were not kept (--window-only), here of "
                    f"{describe(record.signature)} in step {record.row.step}. Start the program from its own "
                    f"checkpoint of step {first}, by its own options, and replay with --from-step {first}."
                )
            raise ValuesMissingError(
                f"Rank {record.rank} was recorded without values: there is nothing to restore for "
                f"{describe(record.signature)}. Record again with --payload {record.rank}, or ask for "
                "--task structure."
            )
        outputs, values = call.outputs, [trace.payload(address) for address in completion.out_addresses]
        for tensor, value in zip(outputs, values, strict=True):
            if tensor.layout is torch.strided and tensor.nbytes != value.nbytes:
                raise damaged(
                    trace.path,
                    f"a result of {describe(record.signature)} has {value.nbytes} bytes, not {tensor.nbytes}",
                )

        def restore() -> None:
            for tensor, value in zip(outputs, values, strict=True):
                write_bytes(tensor, value)
            if self._on_restored is not None:
                self._on_restored(sum(value.nbytes for value in values))
                for address in completion.out_addresses:
                    trace.release(address)

        return restore
