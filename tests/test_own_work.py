"""RankLens' own work in a replay without recorded times: no part of the program's time."""

from __future__ import annotations

import pytest

from ranklens_core.clock import ManualClock, PausableClock
from ranklens_core.own_work import Excluded


@pytest.fixture
def manual() -> ManualClock:
    return ManualClock(1000)


@pytest.fixture
def time(manual: ManualClock) -> PausableClock:
    return PausableClock(manual)


def test_a_long_call_makes_up_for_own_work(manual: ManualClock, time: PausableClock) -> None:
    own = Excluded(time)
    entered_ns = own.enter()
    manual.advance(30)  # our own work
    due_ns = own.begin_ns(entered_ns, None) + 50
    time.sleep_until(due_ns)
    assert own.leave(due_ns) == 1050
    assert manual.now_ns() == 1050


def test_by_what_a_call_is_too_short_for_the_clock_is_set_back(
    manual: ManualClock, time: PausableClock
) -> None:
    own = Excluded(time)
    for call in range(100):
        entered_ns = own.enter()
        manual.advance(30)
        due_ns = own.begin_ns(entered_ns, None) + 10
        time.sleep_until(due_ns)
        assert own.leave(due_ns) == 1000 + 10 * (call + 1)
    assert (time.now_ns(), manual.now_ns(), time.lost_ns) == (2000, 4000, 0)


def test_a_call_that_does_not_hold_leaves_its_work_to_the_next(
    manual: ManualClock, time: PausableClock
) -> None:
    own = Excluded(time)
    entered_ns = own.enter()
    manual.advance(30)
    own.pass_by(entered_ns)
    manual.advance(100)  # the program's
    begin_ns = own.wait_begin_ns(own.enter())
    assert begin_ns == 1100
    time.sleep_until(1120)
    assert own.leave_wait(1120) == 1120
    assert (time.now_ns(), manual.now_ns()) == (1120, 1130)


def test_a_debuggers_pause_is_told_from_it(manual: ManualClock, time: PausableClock) -> None:
    time.pause()
    manual.advance(500)
    time.resume()
    time.set_back(40)
    manual.advance(100)
    assert (time.now_ns(), time.lost_ns) == (1060, 500)
