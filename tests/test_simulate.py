"""The simulator, timelines and critical paths. Right values are worked out by hand in the comments."""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np
import pytest
import trace_samples as samples
from hypothesis import given
from hypothesis import strategies as st
from timing_samples import GROUPS, WORLD, LogBuilder, again, joined_of, recordings

from ranklens_core.errors import TraceError, UsageError
from ranklens_core.schema import Step
from ranklens_core.timing.binding import bind, recorded_transfers
from ranklens_core.timing.critical_path import Span, SpanKind, critical_path, share_ns
from ranklens_core.timing.estimate import Estimator
from ranklens_core.timing.join import Joined, join
from ranklens_core.timing.network import load_network
from ranklens_core.timing.ranklog import RankLog
from ranklens_core.timing.schedule import Compute, schedules
from ranklens_core.timing.simulate import Simulation, simulate
from ranklens_core.timing.timeline import virtual_timeline, what_if
from ranklens_core.trace import open_trace, write_run

PAIR = {"0,1": (0, 1)}


def run(joined: Joined, transfer_ns: int, compute: Compute = Compute.WALL) -> Simulation:
    """The job with the same transfer for every call."""
    transfers = np.full(len(joined.rank), transfer_ns, np.int64)
    return simulate(joined, bind(joined), schedules(joined, compute), transfers)


def two() -> tuple[LogBuilder, LogBuilder]:
    return LogBuilder(0, PAIR), LogBuilder(1, PAIR)


def test_a_collective_starts_when_the_last_rank_comes_and_blocking_calls_hold() -> None:
    first, second = two()
    first.call("all_reduce", "0,1", 10, 40, blocks=True)
    first.call("all_reduce", "0,1", 45, 60, blocks=True)  # 5 of own compute
    second.call("all_reduce", "0,1", 30, 40, blocks=True)
    second.call("all_reduce", "0,1", 41, 60, blocks=True)  # 1
    joined, _ = joined_of(first, second)
    simulation = run(joined, 7)
    # ends at 30 + 7; then rank 0 comes at 42, rank 1 at 38: ends at 49
    assert simulation.start_ns.tolist() == [10, 42, 30, 38]
    assert simulation.end_ns.tolist() == [37, 49, 37, 49]
    assert simulation.release_ns[0].tolist() == [37, 49]


def test_asynchronous_calls_hold_at_their_wait() -> None:
    first, second = two()
    for builder, start in ((first, 0), (second, 5)):
        call = builder.call("all_reduce", "0,1", start, 100)
        builder.wait(call, start + 20, 100)
        builder.call("barrier", "0,1", 103, 110, blocks=True)
    joined, _ = joined_of(first, second)
    long, short = run(joined, 30), run(joined, 2)
    # transfer of 30: over at 35, after both came to their waits (20 and 25); then 3 of compute
    assert long.begin_ns[0].tolist() == [0, 20, 38]
    assert long.release_ns[1].tolist() == [5, 35, 68]
    # transfer of 2: over at 7, nobody waits
    assert short.release_ns[0].tolist() == [0, 20, 30]
    assert short.begin_ns[1].tolist() == [5, 25, 28]


def test_collectives_of_a_group_run_one_after_the_other() -> None:
    first, second = two()
    for builder in (first, second):
        calls = [builder.call("all_reduce", "0,1", start, end) for start, end in ((0, 10), (1, 20))]
        for call, end in zip(calls, (10, 20), strict=True):
            builder.wait(call, max(2, end - 10), end)
    joined, _ = joined_of(first, second)
    assert run(joined, 10).end_ns.tolist() == [10, 20, 10, 20]


def test_messages_and_a_sender_that_does_not_wait() -> None:
    sender, receiver = two()
    # recorded: the send was over at 3, long before its receiver came at 50
    sender.call("send", "0,1", 1, 3, peer=1)
    receiver.call("recv", "0,1", 50, 55, peer=0)
    joined, _ = joined_of(sender, receiver)
    simulation = run(joined, 4)
    assert simulation.end_ns.tolist() == [5, 54]


def test_a_batch_is_over_when_all_its_messages_are() -> None:
    world = {"0-2": (0, 1, 2)}
    ranks = [LogBuilder(rank, world) for rank in range(3)]
    ranks[0].call("send", "0-2", 10, 90, peer=1)
    ranks[1].call("recv", "0-2", 1, 90, peer=0, batch=0)
    ranks[1].wait(ranks[1].call("send", "0-2", 2, 90, peer=2, batch=0), 3, 90)
    ranks[2].call("recv", "0-2", 80, 90, peer=1)
    joined, _ = joined_of(*ranks)
    simulation = run(joined, 5)
    # with rank 0 at 10 + 5, with rank 2 at 80 + 5
    assert simulation.release_ns[1].tolist() == [1, 2, 85]
    assert simulation.end_ns.tolist() == [15, 85, 85, 85]


def test_ranks_that_were_not_recorded_are_not_waited_for() -> None:
    first = LogBuilder(0, PAIR)
    first.call("all_reduce", "0,1", 10, 40, blocks=True)
    joined, _ = joined_of(first)
    assert run(joined, 5).end_ns.tolist() == [15]


def test_a_deadlock_names_who_waits_for_whom() -> None:
    first, second = two()
    for builder, order in ((first, ("0,1", "0,1#1")), (second, ("0,1#1", "0,1"))):
        builder.groups = {"0,1": (0, 1), "0,1#1": (0, 1)}
        for group in order:
            builder.call("all_reduce", group, 0, 1, blocks=True)
    joined, _ = joined_of(first, second)
    with pytest.raises(TraceError) as caught:
        run(joined, 5)
    assert "rank 0, entry 0: all_reduce on group 0,1 waits for rank 1" in str(caught.value)
    assert "rank 1, entry 0: all_reduce on group 0,1#1 waits for rank 0" in str(caught.value)


def test_compute_by_cpu_time_and_scaled() -> None:
    first, second = two()
    for builder, start in ((first, 10), (second, 100)):
        builder.call("all_reduce", "0,1", start, 110, blocks=True)
    joined, _ = joined_of(first, second)
    wall = schedules(joined, Compute.WALL)
    assert [plan.own_ns.tolist() for plan in wall] == [[10], [100]]
    assert wall[1].scaled(0.25).own_ns.tolist() == [25]
    logs = [dataclasses.replace(log, compute_cpu_ns=log.compute_ns // 2) for log in joined.logs]
    assert [plan.own_ns.tolist() for plan in schedules(join(logs), Compute.CPU)] == [[5], [50]]


@given(recordings())
def test_recorded_compute_and_transfers_give_the_recording(logs: list[RankLog]) -> None:
    joined = join(logs)
    simulation = again(joined, bind(joined), survivor=0)
    origin = min((plan.recorded_ns[0] for plan in simulation.schedules if len(plan.entry)), default=0)
    np.testing.assert_array_equal(simulation.end_ns + origin, joined.end_ns)
    np.testing.assert_array_equal(simulation.start_ns + origin, joined.start_ns)


@given(recordings(), st.permutations(WORLD), st.integers(1, 40))
def test_the_order_of_the_ranks_does_not_matter(
    logs: list[RankLog], order: list[int], transfer_ns: int
) -> None:
    results = []
    for arranged in (logs, [logs[rank] for rank in order]):
        joined = join(arranged)
        transfers = np.full(len(joined.rank), transfer_ns, np.int64)
        plans = schedules(joined, Compute.ELAPSED)
        if arranged is not logs:
            plans = [plans[rank] for rank in order]
        results.append(simulate(joined, bind(joined), plans, transfers))
    for name in ("start_ns", "ready_ns", "end_ns", "cause"):
        np.testing.assert_array_equal(getattr(results[0], name), getattr(results[1], name))


@given(recordings(), st.integers(1, 1000))
def test_a_job_that_starts_later_is_later_by_that(logs: list[RankLog], shift_ns: int) -> None:
    joined = join(logs)
    binding, transfers = bind(joined), recorded_transfers(joined, bind(joined))
    plans = schedules(joined, Compute.ELAPSED)
    later = [dataclasses.replace(plan, begin_ns=plan.begin_ns + shift_ns) for plan in plans]
    now, then = (simulate(joined, binding, each, transfers) for each in (plans, later))
    np.testing.assert_array_equal(now.end_ns + shift_ns, then.end_ns)


def test_a_critical_path_by_hand() -> None:
    first, second = two()
    first.call("all_reduce", "0,1", 10, 35, blocks=True)
    first.call("all_reduce", "0,1", 85, 90, blocks=True)  # 50 of own compute
    second.call("all_reduce", "0,1", 30, 35, blocks=True)
    second.call("all_reduce", "0,1", 36, 90, blocks=True)
    joined, _ = joined_of(first, second)
    path = critical_path(run(joined, 5))
    # rank 1 came last to the first, rank 0 to the second; of two that end at once, the first rank's
    assert path == (
        Span(1, SpanKind.COMPUTE, 0, 0, 30),
        Span(0, SpanKind.TRANSFER, 0, 30, 35),
        Span(0, SpanKind.COMPUTE, 1, 35, 85),
        Span(0, SpanKind.TRANSFER, 1, 85, 90),
    )
    assert share_ns(path) == {
        (1, SpanKind.COMPUTE): 30,
        (0, SpanKind.COMPUTE): 50,
        (0, SpanKind.TRANSFER): 10,
    }


@given(recordings())
def test_a_critical_path_has_no_gaps(logs: list[RankLog]) -> None:
    joined = join(logs)
    simulation = run(joined, 11)
    path = critical_path(simulation)
    last = max((int(times[-1]) for times in simulation.release_ns if len(times)), default=0)
    assert sum(span.end_ns - span.begin_ns for span in path) == last
    assert all(before.end_ns == after.begin_ns for before, after in pairwise(path))
    if path:
        assert (path[0].begin_ns, path[-1].end_ns) == (0, last)


def test_there_is_no_path_through_nothing() -> None:
    assert critical_path(run(join([LogBuilder(0, GROUPS).build()]), 1)) == ()


# Whole traces.


def write_two_ranks(directory: Path) -> Path:
    """Each rank: 30 (rank 0) or 10 ns of compute, an all-reduce, a step that ends 5 ns later."""
    write_run(directory, samples.RUN)
    for rank, start in ((0, 131), (1, 111)):
        writer = samples.new_writer(directory, rank)
        writer.group(samples.GROUP)
        writer.signature(msgspec.structs.replace(samples.SIGNATURE, op="all_reduce"))
        own = start - 101
        row = samples.call(0, enqueue_ns=start, start_ns=start, compute_ns=own, compute_cpu_ns=own)
        writer.call(row)
        writer.completion(samples.completion(0, end_ns=151, return_ns=151))
        writer.step(Step(index=0, begin_ns=start - 10, end_ns=156))
        writer.close(0)
    return directory


def test_a_virtual_timeline(tmp_path: Path) -> None:
    estimator = Estimator(load_network("loopback"))
    transfer_ns = estimator.estimate("all_reduce", (0, 1), 24, 24, "float32").transfer_ns
    with open_trace(write_two_ranks(tmp_path)) as trace:
        timeline = virtual_timeline(trace, estimator)
    assert [rank.start_ns.tolist() for rank in timeline.ranks] == [[30], [10]]
    assert [rank.end_ns.tolist() for rank in timeline.ranks] == [[30 + transfer_ns]] * 2
    # steps: from 10 before the call to 5 after its end
    assert [rank.steps[0].begin_ns for rank in timeline.ranks] == [20, 0]
    assert [rank.steps[0].end_ns for rank in timeline.ranks] == [35 + transfer_ns] * 2
    assert timeline.transfers == {"alpha-beta, loopback": 1}


def test_a_what_if_with_a_slower_rank(tmp_path: Path) -> None:
    with open_trace(write_two_ranks(tmp_path)) as trace:
        same = what_if(trace)
        slower = what_if(trace, compute=Compute.WALL, compute_scale={1: 5.0})
        with pytest.raises(UsageError, match=r"compute scale for ranks \[7\], but recorded are 0, 1"):
            what_if(trace, compute_scale={7: 2.0})
        with pytest.raises(UsageError, match="must be a positive number"):
            what_if(trace, compute_scale={0: 0.0})
    # as recorded, from rank 1's first call on: rank 0 comes 20 later, both end 40 after it
    assert [rank.end_ns.tolist() for rank in same.ranks] == [[40], [40]]
    assert same.transfers == {"recorded": 1}
    # rank 1 computes 50 instead of 10, and comes last; the recorded transfer is 151 - 131
    assert [rank.end_ns.tolist() for rank in slower.ranks] == [[70], [70]]
