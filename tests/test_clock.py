"""A clock that pauses: exact with a manual one below it, and safe between threads."""

from __future__ import annotations

import threading

import pytest

from ranklens_core.clock import ManualClock, PausableClock


@pytest.fixture
def below() -> ManualClock:
    return ManualClock(100)


def test_it_stands_still_between_pause_and_resume(below: ManualClock) -> None:
    clock = PausableClock(below)
    below.advance(5)
    clock.pause()
    below.advance(1000)
    assert clock.now_ns() == 105
    clock.resume()
    below.advance(1)
    assert (clock.now_ns(), clock.lost_ns) == (106, 1000)


def test_pauses_nest(below: ManualClock) -> None:
    clock = PausableClock(below)
    clock.pause()
    clock.pause()
    below.advance(10)
    clock.resume()
    below.advance(10)
    assert clock.now_ns() == 100
    clock.resume()
    assert (clock.now_ns(), clock.lost_ns) == (100, 20)


def test_a_sleep_is_longer_by_the_pauses(below: ManualClock) -> None:
    clock = PausableClock(below)
    clock.pause()
    below.advance(50)
    clock.resume()
    clock.sleep_until(130)
    assert (clock.now_ns(), below.now_ns()) == (130, 180)


def test_who_paused_does_not_wait_for_time_that_stands_still(below: ManualClock) -> None:
    clock = PausableClock(below)
    clock.pause()
    clock.sleep_until(130)
    assert (clock.now_ns(), below.now_ns()) == (130, 100)
    below.advance(1)
    clock.resume()
    assert clock.now_ns() == 130
    below.advance(1)
    assert clock.now_ns() == 131


def test_others_sleep_until_time_goes_on(below: ManualClock) -> None:
    clock = PausableClock(below)
    clock.pause()
    ended_at: list[int] = []

    def sleep() -> None:
        clock.sleep_until(130)
        ended_at.append(clock.now_ns())

    sleeper = threading.Thread(target=sleep)
    sleeper.start()
    below.advance(500)
    assert ended_at == []
    clock.resume()
    sleeper.join(30)
    assert ended_at == [130]


def test_it_never_goes_back_while_another_thread_pauses() -> None:
    clock = PausableClock(ManualClock())
    below: ManualClock = clock._clock  # type: ignore[assignment]
    over = threading.Event()

    def stop_and_go() -> None:
        for _ in range(2000):
            clock.pause()
            below.advance(7)
            clock.resume()
            below.advance(1)
        over.set()

    thread = threading.Thread(target=stop_and_go)
    thread.start()
    last = 0
    while not over.is_set():
        now = clock.now_ns()
        assert now >= last
        last = now
    thread.join()
    assert (clock.now_ns(), clock.lost_ns) == (2000, 14_000)
