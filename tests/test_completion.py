"""The CPU completion engine: exact with a manual clock, in time with the real one."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator

import pytest

from ranklens_core.clock import ManualClock, MonotonicClock
from ranklens_core.completion.cpu import CpuEngine
from ranklens_core.errors import UsageError


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(1000)


@pytest.fixture
def engine(clock: ManualClock) -> CpuEngine:
    return CpuEngine(clock, threaded=False)


def test_nothing_arrives_before_its_time(clock: ManualClock, engine: CpuEngine) -> None:
    arrived: list[str] = []
    completion = engine.submit(1010, lambda: arrived.append("a"))
    clock.advance(9)
    engine.run_due()
    assert (arrived, completion.done_ns) == ([], None)
    clock.advance(1)
    engine.run_due()
    assert (arrived, completion.done_ns) == (["a"], 1010)


def test_order_is_by_time_then_by_submission(clock: ManualClock, engine: CpuEngine) -> None:
    arrived: list[str] = []
    for name, due_ns in (("late", 1030), ("tie 1", 1020), ("early", 1010), ("tie 2", 1020)):
        engine.submit(due_ns, lambda name=name: arrived.append(name))  # type: ignore[misc]
    clock.advance(100)
    engine.run_due()
    assert arrived == ["early", "tie 1", "tie 2", "late"]


def test_waiting_delivers_what_is_due_before(clock: ManualClock, engine: CpuEngine) -> None:
    arrived: list[tuple[str, int]] = []
    for name, due_ns in (("a", 1010), ("b", 1025)):
        engine.submit(due_ns, lambda name=name: arrived.append((name, clock.now_ns())))  # type: ignore[misc]
    waited = engine.submit(1020, lambda: arrived.append(("waited", clock.now_ns())))
    engine.wait_for(waited)
    assert arrived == [("a", 1010), ("waited", 1020)]
    assert clock.now_ns() == 1020


def test_a_result_that_is_due_already_arrives_at_once(clock: ManualClock, engine: CpuEngine) -> None:
    arrived: list[int] = []
    engine.wait_for(engine.submit(900, lambda: arrived.append(clock.now_ns())))
    assert arrived == [1000]
    assert engine.lateness().max_ns == 100


def test_lateness_is_zero_where_time_is_exact(engine: CpuEngine) -> None:
    for due_ns in range(1001, 1101):
        engine.submit(due_ns, lambda: None)
    engine.sleep_until(2000)
    assert (engine.lateness().count, engine.lateness().max_ns) == (100, 0)


def test_closing_delivers_the_rest_and_refuses_more(engine: CpuEngine) -> None:
    arrived: list[int] = []
    engine.submit(5000, lambda: arrived.append(1))
    engine.close()
    engine.close()
    assert arrived == [1]
    with pytest.raises(UsageError, match="The replay is over"):
        engine.submit(6000, lambda: None)


@pytest.fixture
def real() -> Iterator[CpuEngine]:
    engine = CpuEngine(MonotonicClock())
    yield engine
    engine.close()


def test_the_thread_delivers_what_nobody_waits_for(real: CpuEngine) -> None:
    clock, arrived = MonotonicClock(), threading.Event()
    due_ns = clock.now_ns() + 2_000_000
    completion = real.submit(due_ns, arrived.set)
    assert completion.done_ns is None
    assert arrived.wait(10)
    assert completion.done_ns is not None
    assert completion.done_ns >= due_ns


def test_an_earlier_submission_wakes_the_thread(real: CpuEngine) -> None:
    clock, early = MonotonicClock(), threading.Event()
    late = real.submit(clock.now_ns() + 3_600_000_000_000, lambda: None)
    real.submit(clock.now_ns() + 1_000_000, early.set)
    assert early.wait(10)
    assert late.done_ns is None


def test_one_of_many_waiters_delivers(real: CpuEngine) -> None:
    arrived: list[str] = []
    completion = real.submit(
        MonotonicClock().now_ns() + 5_000_000, lambda: arrived.append(threading.current_thread().name)
    )
    waiters = [threading.Thread(target=real.wait_for, args=(completion,)) for _ in range(8)]
    for waiter in waiters:
        waiter.start()
    for waiter in waiters:
        waiter.join()
    assert len(arrived) == 1


def test_the_interpreter_is_left_as_it_was() -> None:
    before = sys.getswitchinterval()
    engine = CpuEngine(MonotonicClock())
    assert sys.getswitchinterval() < before
    engine.close()
    assert sys.getswitchinterval() == before
    assert not [thread for thread in threading.enumerate() if thread.name == "ranklens-completion"]
