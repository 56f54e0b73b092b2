"""What the program notices of RankLens' own work; a manual clock, whose CPU time moves with it."""

from __future__ import annotations

from ranklens_core.clock import ManualClock
from ranklens_core.own_work import Excluded


class Idle(ManualClock):
    """A clock whose time can pass without the thread having run."""

    idle_ns = 0

    def thread_cpu_ns(self) -> int:
        return self.now_ns() - self.idle_ns

    def pass_idle(self, by_ns: int) -> None:
        self.advance(by_ns)
        self.idle_ns += by_ns


def test_work_in_an_asynchronous_call_is_made_up_for() -> None:
    clock = Idle(1000)
    own = Excluded(clock)
    begin = own.begin_ns(own.enter(), None)
    clock.advance(30)  # matching, submitting
    own.leave(begin)
    clock.advance(100)  # the program computes
    # it came 130 after the first call, 30 of which were ours
    assert own.begin_ns(own.enter(), None) == 1100
    assert own.wait_begin_ns(clock.now_ns()) == 1100


def test_work_in_a_call_that_holds_the_program_longer_is_no_loss() -> None:
    clock = Idle(1000)
    own = Excluded(clock)
    own.enter()
    clock.advance(30)
    clock.pass_idle(70)
    own.leave(1100)
    assert own.begin_ns(own.enter(), None) == 1100


def test_what_is_not_made_up_for_at_once_is_carried_on() -> None:
    clock = Idle(1000)
    own = Excluded(clock)
    begin = own.begin_ns(own.enter(), None)
    clock.advance(50)
    own.leave(begin)
    begin = own.begin_ns(own.enter(), None)
    assert begin == 1000
    clock.advance(5)
    own.leave(begin + 20)  # a transfer of 20: 35 are left
    assert own.begin_ns(own.enter(), None) == 1055 - 35


def test_a_busy_machine_is_not_our_work() -> None:
    clock = Idle(1000)
    own = Excluded(clock)
    begin = own.begin_ns(own.enter(), None)
    clock.advance(10)
    clock.pass_idle(5000)  # others had the core
    own.leave(begin)
    assert own.begin_ns(own.enter(), None) == 6010 - 10
