"""The virtual clock: the simulated job in place of the recorded times, exact by hand and at random."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_arrival import by_entry, dues
from timing_samples import WORLD, LogBuilder, recordings

from ranklens_core.timing.arrival import plan_arrivals
from ranklens_core.timing.binding import bind, bound_at
from ranklens_core.timing.join import join
from ranklens_core.timing.ranklog import NO_TIME, RankLog
from ranklens_core.timing.schedule import Compute, schedules
from ranklens_core.timing.simulate import Simulation, simulate
from ranklens_core.timing.virtual import in_virtual_time

PAIR = {"0,1": (0, 1)}


def simulated(logs: list[RankLog], transfer_ns: int) -> Simulation:
    """The job on the ranks' CPU time, every transfer taking ``transfer_ns``."""
    joined = join(logs)
    transfers = np.full(len(joined.rank), transfer_ns, np.int64)
    return simulate(joined, bind(joined), schedules(joined, Compute.CPU), transfers)


@pytest.fixture
def shared_core() -> list[RankLog]:
    """Two ranks that took turns on one core: rank 0 has 10 and 20 of own CPU time, rank 1 has 30 and 5,
    then both wait; recorded times are many times that."""
    first, second = LogBuilder(0, PAIR), LogBuilder(1, PAIR)
    for builder, start in ((first, 1000), (second, 3000)):
        builder.call("all_reduce", "0,1", start, 5000, blocks=True)
        call = builder.call("all_reduce", "0,1", 5000 + start, 9000)
        builder.wait(call, 8500, 9000)
    cpu = {0: ([10, 20], [3]), 1: ([30, 5], [1])}
    return [
        dataclasses.replace(
            builder.build(),
            compute_cpu_ns=np.array(cpu[rank][0], np.int64),
            wait_compute_cpu_ns=np.array(cpu[rank][1], np.int64),
        )
        for rank, builder in enumerate((first, second))
    ]


def test_recorded_times_give_way_to_those_of_the_simulation(shared_core: list[RankLog]) -> None:
    simulation = simulated(shared_core, 100)
    first, second = in_virtual_time(simulation).logs
    # rank 1 comes last, at 30: over at 130. Then rank 0 comes at 150, rank 1 at 135: over at 250
    assert (first.start_ns.tolist(), second.start_ns.tolist()) == ([10, 150], [30, 135])
    assert first.end_ns.tolist() == second.end_ns.tolist() == [130, 250]
    assert first.return_ns.tolist() == [130, NO_TIME]
    # the program waits 3 and 1 after it had issued the call
    assert (first.wait_begin_ns.tolist(), second.wait_begin_ns.tolist()) == ([153], [136])
    assert first.wait_end_ns.tolist() == second.wait_end_ns.tolist() == [250]
    # RankLens' own work takes no time
    assert first.enqueue_ns.tolist() == first.start_ns.tolist()


def test_who_had_come_when_is_told_at_the_new_times(shared_core: list[RankLog]) -> None:
    simulation = simulated(shared_core, 100)
    joined = in_virtual_time(simulation)
    binding = bind(simulation.joined)
    assert binding.ready_ns.tolist() == [3000, 8000, 3000, 8000]
    moved = bound_at(joined, binding)
    assert moved.ready_ns.tolist() == [30, 150, 30, 150]
    assert moved.waits_for_others.tolist() == binding.waits_for_others.tolist()


@pytest.mark.parametrize(
    ("compute", "ends"),
    [
        pytest.param(20, (130, 250), id="as in the timeline: the survivor comes last, at 150"),
        pytest.param(4, (130, 235), id="faster: it waits for rank 1, which comes at 135"),
        pytest.param(50, (130, 280), id="slower"),
    ],
)
def test_the_survivor_keeps_virtual_time(
    shared_core: list[RankLog], compute: int, ends: tuple[int, int]
) -> None:
    joined = in_virtual_time(simulated(shared_core, 100))
    plan = plan_arrivals(joined, bound_at(joined, bind(join(shared_core))), 0)
    assert dues(plan, {0: 10, 1: 130 + compute}) == dict(enumerate(ends))


@given(recordings(), st.sampled_from(WORLD), st.data())
def test_at_the_virtual_pace_calls_end_at_their_virtual_times(
    logs: list[RankLog], survivor: int, data: st.DataObject
) -> None:
    """Ranks whose CPU time is any part of what was recorded, on a network of any speed."""
    share = data.draw(st.lists(st.integers(0, 3), min_size=len(WORLD), max_size=len(WORLD)))
    logs = [
        dataclasses.replace(
            log,
            compute_cpu_ns=log.compute_ns * share[log.rank],
            wait_compute_cpu_ns=log.wait_compute_ns * share[log.rank],
        )
        for log in logs
    ]
    joined = join(logs)
    binding = bind(joined)
    transfers = np.array([data.draw(st.integers(0, 40)) for _ in range(joined.n_exchanges)], np.int64)
    simulation = simulate(joined, binding, schedules(joined, Compute.CPU), transfers[joined.exchange])
    virtual = in_virtual_time(simulation)
    plan = plan_arrivals(virtual, bound_at(virtual, binding), survivor)
    arrived = by_entry(virtual, survivor, virtual.start_ns)
    assert dues(plan, arrived) == by_entry(virtual, survivor, simulation.end_ns)


@given(recordings())
def test_bound_at_the_recorded_times_is_the_recorded_binding(logs: list[RankLog]) -> None:
    joined = join(logs)
    binding = bind(joined)
    moved = bound_at(joined, binding)
    assert moved.ready_ns.tolist() == binding.ready_ns.tolist()
    assert moved.together.tolist() == binding.together.tolist()
