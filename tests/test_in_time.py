"""Delivery in time, exact with a manual clock: late, early and equal survivors of a pair of ranks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from fake_world import fake_world
from timing_samples import LogBuilder, joined_of

from ranklens_core.c10d.call import Call, Proceed
from ranklens_core.c10d.groups import Groups
from ranklens_core.c10d.interpose import install
from ranklens_core.c10d.signature import Signatures
from ranklens_core.c10d.work import FINISHED, Handles
from ranklens_core.clock import ManualClock, PausableClock
from ranklens_core.completion.cpu import CpuEngine
from ranklens_core.delivery import TimeSource
from ranklens_core.in_time import InTime
from ranklens_core.schema import CallRecord, CallRow, CompletionRow, Phase
from ranklens_core.timing.arrival import Anchor, ArrivalTimer, Basis, plan_arrivals
from ranklens_core.timing.exposed import Exposed


class Timer(ArrivalTimer):
    """Times written down by hand: entry -> (anchors, transfer)."""

    def __init__(self, entries: dict[int, tuple[tuple[Anchor, ...], int]]) -> None:
        self.rank = 0
        self._transfer_ns = [entries[entry][1] for entry in sorted(entries)]
        self._anchors = [entries[entry][0] for entry in sorted(entries)]
        self._basis = [int(Basis.RECORDED)] * len(entries)


def record_of(entry: int, call: Call, signatures: Signatures, delayed_ns: int = 0) -> CallRecord:
    row = CallRow(
        entry=entry,
        signature=0,
        seq_id=entry,
        step=0,
        phase=Phase.STEP,
        training=True,
        batch=-1,
        enqueue_ns=0,
        start_ns=0,
        compute_ns=0,
        compute_cpu_ns=0,
        delayed_ns=delayed_ns,
    )
    end = CompletionRow(entry=entry, end_ns=1, return_ns=1, src_rank=-1, out_addresses=(), error="")
    return CallRecord(rank=0, signature=signatures.of(call).signature, row=row, completion=end)


class Answers:
    """A handler that fills every call with its entry number, delivered by ``InTime``."""

    def __init__(self, delivery: InTime, signatures: Signatures) -> None:
        self.delivery = delivery
        self.signatures = signatures
        self.handles = Handles()
        self.entry = -1
        self.delayed_ns = 0

    def handle(self, call: Call, proceed: Proceed) -> object:
        self.entry += 1
        entry = self.entry
        interned = self.signatures.of(call)
        record = record_of(entry, call, self.signatures, self.delayed_ns)
        fill = lambda: call.outputs[0].detach().fill_(100 + entry)  # noqa: E731
        work = self.delivery.deliver(call, interned, record, fill, self.delivery.enter())
        assert work is not None
        return work if work is FINISHED else self.handles.track(work, entry)

    def on_wait(self, work: dist.Work, wait: object) -> object:
        self.delivery.before_wait(work)
        return wait()  # type: ignore[operator]

    def on_wait_tensor(self, tensor: torch.Tensor, wait: object) -> object:
        return wait()  # type: ignore[operator]

    def start_batch(self, pg: object) -> None: ...

    def end_batch(self, pg: object, proceed: Proceed) -> object:
        return proceed()


class Stage:
    """A fake world of two whose calls are timed by hand."""

    def __init__(self, entries: dict[int, tuple[tuple[Anchor, ...], int]] | ArrivalTimer) -> None:
        timer = entries if isinstance(entries, ArrivalTimer) else Timer(entries)
        self.clock = ManualClock(1000)
        self.time = PausableClock(self.clock)
        self.engine = CpuEngine(self.time, threaded=False)
        self.delivery = InTime(self.engine, self.time, timer, None, exact=True)
        self.groups = Groups(lambda _: None)
        signatures = Signatures(self.groups, None, lambda _: None)
        self.answers = Answers(self.delivery, signatures)
        self.interposer = install(self.answers)  # type: ignore[arg-type]

    def close(self) -> None:
        self.interposer.remove()
        self.groups.close()
        self.delivery.close()


@pytest.fixture
def stages() -> Iterator[list[Stage]]:
    made: list[Stage] = []
    with fake_world(0, 2):
        yield made
        for stage in made:
            stage.close()


FIRST = ((), 10)
"""A call that depends on nobody and takes 10 ns."""


@pytest.mark.parametrize(
    ("compute_ns", "ends_ns"),
    [
        # the peer comes 50 ns after the end of the first call (1010), the transfer takes 7
        (50, 1010 + 50 + 7),  # as recorded: both come at 1060
        (20, 1010 + 50 + 7),  # early: waits 30 more for the peer
        (80, 1010 + 80 + 7),  # late: the peer waits
    ],
)
def test_early_equal_and_late_survivors(stages: list[Stage], compute_ns: int, ends_ns: int) -> None:
    stage = Stage({0: FIRST, 1: ((Anchor(0, True, 50),), 7)})
    stages.append(stage)
    value = torch.zeros(2)
    dist.all_reduce(value)
    assert stage.clock.now_ns() == 1010
    stage.clock.advance(compute_ns)
    dist.all_reduce(value)
    assert stage.clock.now_ns() == ends_ns
    assert value.tolist() == [101, 101]
    assert stage.delivery.times == {TimeSource.RECORDED: 2}


def test_an_asynchronous_result_arrives_in_its_time(stages: list[Stage]) -> None:
    stage = Stage({0: FIRST})
    stages.append(stage)
    value = torch.zeros(2)
    work = dist.all_reduce(value, async_op=True)
    stage.clock.advance(9)
    stage.engine.run_due()
    assert (work.is_completed(), value.tolist()) == (False, [0, 0])
    stage.clock.advance(1)
    stage.engine.run_due()
    assert (work.is_completed(), value.tolist()) == (True, [100, 100])
    work.wait()
    assert stage.clock.now_ns() == 1010


def test_waiting_ends_when_the_result_arrives(stages: list[Stage]) -> None:
    stage = Stage({0: FIRST})
    stages.append(stage)
    value = torch.zeros(2)
    seen: list[list[float]] = []
    work = dist.all_reduce(value, async_op=True)
    work.get_future().add_done_callback(lambda _: seen.append(value.tolist()))
    work.wait()
    assert (stage.clock.now_ns(), seen) == (1010, [[100, 100]])
    work.wait()
    assert stage.clock.now_ns() == 1010


def test_overlapped_compute_hides_the_transfer(stages: list[Stage]) -> None:
    stage = Stage({0: ((), 30)})
    stages.append(stage)
    work = dist.all_reduce(torch.zeros(2), async_op=True)
    stage.clock.advance(45)
    work.wait()
    assert stage.clock.now_ns() == 1045


def test_a_call_held_for_one_that_comes_after_it(stages: list[Stage]) -> None:
    # the peer came to call 0 only 5 ns after call 1 had ended, which was issued while call 0 was in flight
    stage = Stage({0: ((Anchor(1, True, 5),), 2), 1: ((), 20)})
    stages.append(stage)
    first, second = torch.zeros(1), torch.zeros(1)
    one = dist.all_reduce(first, async_op=True)
    stage.clock.advance(10)
    two = dist.all_reduce(second, async_op=True)
    two.wait()
    assert (stage.clock.now_ns(), one.is_completed()) == (1030, False)
    one.wait()
    assert stage.clock.now_ns() == 1030 + 5 + 2
    assert (first.item(), second.item()) == (100, 101)


def test_closing_leaves_no_call_unanswered(stages: list[Stage]) -> None:
    stage = Stage({0: ((), 10_000)})
    stages.append(stage)
    value = torch.zeros(1)
    work = dist.all_reduce(value, async_op=True)
    stage.delivery.close()
    assert (work.is_completed(), value.item()) == (True, 100)


def test_time_that_other_threads_took_from_the_recorded_one_is_kept(stages: list[Stage]) -> None:
    """Between two calls the recorded thread waited 500 ns for a core, this one 100 for something: 400 are
    missing."""
    stage = Stage({0: FIRST, 1: FIRST})
    stages.append(stage)
    tensor = torch.zeros(1)
    dist.all_reduce(tensor)
    assert stage.clock.now_ns() == 1010
    stage.clock.advance(100)
    stage.clock.cpu_off_ns += 100
    stage.answers.delayed_ns = 500
    dist.all_reduce(tensor)
    assert stage.clock.now_ns() == 1010 + 500 + 10


def test_a_stop_in_the_debugger_shifts_what_is_due(stages: list[Stage]) -> None:
    stage = Stage({0: ((), 30), 1: ((Anchor(0, True, 50),), 7)})
    stages.append(stage)
    work = dist.all_reduce(torch.zeros(2), async_op=True)
    stage.clock.advance(10)
    stage.time.pause()
    stage.clock.advance(5000)
    stage.engine.run_due()
    assert not work.is_completed()
    stage.time.resume()
    work.wait()
    assert (stage.time.now_ns(), stage.clock.now_ns()) == (1030, 6030)
    dist.all_reduce(torch.zeros(2))
    assert (stage.time.now_ns(), stage.clock.now_ns()) == (1030 + 50 + 7, 6030 + 50 + 7)
    assert stage.engine.lateness().max_ns == 0


def test_waiting_at_the_prompt_moves_time_on(stages: list[Stage]) -> None:
    stage = Stage({0: ((), 30)})
    stages.append(stage)
    value = torch.zeros(2)
    work = dist.all_reduce(value, async_op=True)
    stage.time.pause()
    work.wait()
    assert (value.tolist(), stage.time.now_ns(), stage.clock.now_ns()) == ([100, 100], 1030, 1000)
    stage.clock.advance(400)
    stage.time.resume()
    assert stage.time.now_ns() == 1030


def test_a_call_made_at_the_prompt_is_answered_at_once(stages: list[Stage]) -> None:
    stage = Stage({0: ((), 30)})
    stages.append(stage)
    stage.time.pause()
    stage.engine.pause()
    work = dist.all_reduce(torch.zeros(2), async_op=True)
    assert work.is_completed()
    stage.engine.resume()
    stage.time.resume()


@pytest.mark.parametrize(
    ("compute_ns", "wait_ns", "transfer_ns"),
    # as in test_early_equal_and_late_survivors: the first call takes 10, the second one's transfer 7
    [(50, 0, 17), (20, 30, 17), (80, 0, 17)],
)
def test_waiting_is_told_from_transfer(
    stages: list[Stage], compute_ns: int, wait_ns: int, transfer_ns: int
) -> None:
    stage = Stage({0: FIRST, 1: ((Anchor(0, True, 50),), 7)})
    stages.append(stage)
    dist.all_reduce(torch.zeros(2))
    stage.clock.advance(compute_ns)
    dist.all_reduce(torch.zeros(2))
    assert stage.delivery.exposed.take() == Exposed(wait_ns, transfer_ns, 0)


def test_what_is_overlapped_is_not_exposed(stages: list[Stage]) -> None:
    # the peer comes 40 after the first call's end, the transfer takes 30: due at 1080
    stage = Stage({0: FIRST, 1: ((Anchor(0, True, 40),), 30)})
    stages.append(stage)
    dist.all_reduce(torch.zeros(2))
    stage.delivery.exposed.take()
    work = dist.all_reduce(torch.zeros(2), async_op=True)
    stage.clock.advance(55)
    work.wait()
    assert stage.delivery.exposed.take() == Exposed(0, 15, 0)
    work.wait()
    assert stage.delivery.exposed.take() == Exposed(0, 0, 0)


@pytest.mark.parametrize(
    ("own_ns", "ends_ns", "held"),
    [
        # recorded: this rank comes after 40, its peer after 65 from the end of the call before; transfer 5
        (40, 70, Exposed(25, 5)),
        (60, 70, Exposed(5, 5)),  # slower by 20: the peer is late by 5 alone
        (20, 70, Exposed(45, 5)),  # faster by 20: waits 20 more
        (95, 100, Exposed(0, 5)),  # slower than the peer, which waits instead
    ],
)
def test_another_pace_against_a_recording(
    stages: list[Stage], own_ns: int, ends_ns: int, held: Exposed
) -> None:
    own, peer = (LogBuilder(rank, {"0-1": (0, 1)}) for rank in (0, 1))
    for step in range(4):
        own.call("all_reduce", "0-1", step * 70 + 40, step * 70 + 70, blocks=True)
        peer.call("all_reduce", "0-1", step * 70 + 65, step * 70 + 70, blocks=True)
    joined, binding = joined_of(own, peer)
    stage = Stage(ArrivalTimer(plan_arrivals(joined, binding, 0)))
    stages.append(stage)
    dist.all_reduce(torch.zeros(2))  # the first one ties the two together
    for _ in range(3):
        begin_ns = stage.clock.now_ns()
        stage.delivery.exposed.take()
        stage.clock.advance(own_ns)
        dist.all_reduce(torch.zeros(2))
        assert stage.clock.now_ns() - begin_ns == ends_ns
        assert stage.delivery.exposed.take() == held
