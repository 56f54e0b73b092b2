"""Cores of their own for some ranks: who gets which, kept awake, nothing left behind."""

from __future__ import annotations

import os

import psutil
import pytest

from ranklens_core.errors import UsageError
from ranklens_core.own_cores import CorePlan, plan_cores


@pytest.fixture
def four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1, 3, 4, 7})


@pytest.mark.usefixtures("four_cores")
def test_the_last_cores_are_given_away() -> None:
    assert plan_cores([5], 8) == CorePlan({5: 7}, frozenset({1, 3, 4}))
    assert plan_cores([5, 0], 8) == CorePlan({5: 4, 0: 7}, frozenset({1, 3}))


@pytest.mark.usefixtures("four_cores")
@pytest.mark.parametrize(
    ("ranks", "says"),
    [([8], "--own-core 8: not one of the 8 ranks"), ([0, 1, 2, 3], "for 4 ranks, but there are 4 cores")],
)
def test_what_cannot_be(ranks: list[int], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        plan_cores(ranks, 8)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_an_own_core_is_kept_awake_by_a_process_that_gives_way() -> None:
    before = os.sched_getaffinity(0)
    plan = plan_cores([1], 2)
    with plan.kept_awake():
        [keeper] = psutil.Process().children()
        assert os.sched_getaffinity(keeper.pid) == {plan.own[1]}
        assert os.sched_getscheduler(keeper.pid) == os.SCHED_IDLE
        assert os.sched_getaffinity(0) == plan.shared
    assert os.sched_getaffinity(0) == before
    assert not psutil.Process().children()
