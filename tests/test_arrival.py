"""Recorded timing. In the comments: who came when, and what follows by hand."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from timing_samples import WORLD, LogBuilder, again, joined_of, recordings

from ranklens_core.errors import TraceIncompleteError
from ranklens_core.timing.arrival import Anchor, ArrivalPlan, ArrivalTimer, Basis, plan_arrivals
from ranklens_core.timing.binding import Binding, bind
from ranklens_core.timing.join import Joined, join
from ranklens_core.timing.ranklog import NO_TIME, Int64, RankLog

PAIR = {"0,1": (0, 1), "0,1#1": (0, 1)}
UNBOUNDED = 10**6
"""For ``max_terms``: every term is kept."""


def dues(plan: ArrivalPlan, arrived_ns: Mapping[int, int]) -> dict[int, int]:
    """When each call is due, given when the survivor comes to each (by entry)."""
    timer = ArrivalTimer(plan)
    known: dict[int, int] = {}

    def due_ns(entry: int) -> int:
        if entry not in known:
            known[entry] = timer.due_ns(entry, arrived_ns[entry], due_ns, arrived_ns.__getitem__)
        return known[entry]

    return {entry: due_ns(entry) for entry in arrived_ns}


def plan_of(survivor: int, *builders: LogBuilder) -> ArrivalPlan:
    joined, binding = joined_of(*builders)
    return plan_arrivals(joined, binding, survivor)


def by_entry(joined: Joined, rank: int, of_rows: Int64) -> dict[int, int]:
    rows = joined.rows_of(rank)
    return dict(zip(joined.entry[rows].tolist(), of_rows[joined.unit[rows]].tolist(), strict=True))


@pytest.fixture
def two_calls() -> ArrivalPlan:
    """Rank 0 comes at 10 and, after 15 ns, at 50; rank 1 at 30 and, 25 ns after the first call, at 60.
    The calls end at 35 and 70: transfers of 5 and 10."""
    own, peer = LogBuilder(0, PAIR), LogBuilder(1, PAIR)
    own.call("all_reduce", "0,1", 10, 35, blocks=True)
    own.call("all_reduce", "0,1", 50, 70, blocks=True)
    peer.call("all_reduce", "0,1", 30, 35, blocks=True)
    peer.call("all_reduce", "0,1", 60, 70, blocks=True)
    return plan_of(0, own, peer)


def test_a_plan_keeps_arrivals_and_transfer_apart(two_calls: ArrivalPlan) -> None:
    assert two_calls.last_peer_ns.tolist() == [30, 60]
    assert two_calls.transfer_ns.tolist() == [5, 10]
    assert two_calls.wait_ns.tolist() == [20, 10]
    assert two_calls.basis.tolist() == [Basis.RECORDED, Basis.RECORDED]


@pytest.mark.parametrize(
    ("arrivals", "ends"),
    [
        pytest.param((10, 50), (35, 70), id="equal"),
        pytest.param((10, 40), (35, 70), id="early: it waits 10 longer"),
        pytest.param((10, 60), (35, 70), id="as late as the peer"),
        pytest.param((10, 65), (35, 75), id="late: the peer waits"),
        pytest.param((110, 150), (135, 170), id="all later: peers keep their distance from the first call"),
    ],
)
def test_equal_early_and_late(
    two_calls: ArrivalPlan, arrivals: tuple[int, int], ends: tuple[int, int]
) -> None:
    assert dues(two_calls, dict(enumerate(arrivals))) == dict(enumerate(ends))


def test_a_peer_that_was_held_back_comes_earlier_when_it_no_longer_is() -> None:
    own, peer = LogBuilder(0, PAIR), LogBuilder(1, PAIR)
    for builder, starts in ((own, (0, 100, 145)), (peer, (0, 20, 150))):
        for start, end in zip(starts, (5, 110, 160), strict=True):
            builder.call("all_reduce", "0,1", start, end, blocks=True)
    plan = plan_of(0, own, peer)
    # rank 1 came to the second call at 20 and waited for rank 0 until 100. Rank 0 now comes at 30: the
    # call ends at 30 + 10, rank 1 is at the third 40 later, at 80, and that takes 10
    assert dues(plan, {0: 0, 1: 30, 2: 75}) == {0: 5, 1: 40, 2: 90}
    # at 10, rank 1 is the later one, at 20
    assert dues(plan, {0: 0, 1: 10, 2: 15}) == {0: 5, 1: 30, 2: 80}


def test_a_receive_waits_for_its_sender() -> None:
    own, peer = LogBuilder(0, PAIR), LogBuilder(1, PAIR)
    own.call("barrier", "0,1", 0, 5, blocks=True)
    peer.call("barrier", "0,1", 0, 5, blocks=True)
    own.wait(own.call("recv", "0,1", 10, 44, peer=1), 11, 44)
    peer.call("send", "0,1", 40, 41, peer=0)
    plan = plan_of(0, own, peer)
    assert dues(plan, {0: 0, 1: 10})[1] == 44
    assert dues(plan, {0: 0, 1: 60})[1] == 64  # the message is there
    assert dues(plan, {0: 100, 1: 110})[1] == 144  # the sender left the barrier 100 later


def test_a_send_that_waited_for_its_receiver_waits_again() -> None:
    own, peer = LogBuilder(0, PAIR), LogBuilder(1, PAIR)
    own.call("send", "0,1", 10, 33, peer=1)
    peer.call("recv", "0,1", 30, 35, peer=0)
    plan = plan_of(0, own, peer)
    assert plan.wait_ns.tolist() == [20]
    # the first call: the peer keeps its distance of 20
    assert dues(plan, {0: 10}) == {0: 33}
    assert dues(plan, {0: 500}) == {0: 523}


def test_an_eager_send_waits_for_nobody_and_ties_the_receiver() -> None:
    own, peer = LogBuilder(0, PAIR), LogBuilder(1, PAIR)
    own.call("barrier", "0,1", 0, 5, blocks=True)
    peer.call("barrier", "0,1", 0, 5, blocks=True)
    own.call("send", "0,1", 8, 12, peer=1)  # over before its receiver comes
    received = peer.call("recv", "0,1", 20, 26, peer=0)
    peer.wait(received, 20, 26)
    own.call("all_reduce", "0,1", 15, 40, blocks=True)
    peer.call("all_reduce", "0,1", 30, 40, blocks=True)
    plan = plan_of(0, own, peer)
    assert plan.wait_ns.tolist() == [0, 0, 15]
    # sent at 18: over 4 later; the receiver, who comes at 20 anyway, does not notice
    assert dues(plan, {0: 0, 1: 18, 2: 25}) == {0: 5, 1: 22, 2: 40}
    # sent at 50: received 6 later at 56, the receiver needs another 4 to the all-reduce
    assert dues(plan, {0: 0, 1: 50, 2: 51}) == {0: 5, 1: 54, 2: 70}


def test_a_send_does_not_wait_if_most_like_it_did_not() -> None:
    own, peer = LogBuilder(0, PAIR), LogBuilder(1, PAIR)
    for start, end, peer_start in ((10, 12, 20), (30, 32, 40), (50, 58, 49), (70, 75, 74)):
        own.call("send", "0,1", start, end, peer=1)
        peer.call("recv", "0,1", peer_start, max(end, peer_start) + 2, peer=0)
    plan = plan_of(0, own, peer)
    # two were over before the receiver came, one may have waited for it; the third cannot tell
    assert plan.last_peer_ns.tolist() == [NO_TIME] * 4
    assert plan.transfer_ns.tolist() == [2, 2, 8, 5]


def test_an_eager_send_of_a_peer_is_not_held_up_by_its_receiver() -> None:
    own, peer = LogBuilder(0, PAIR), LogBuilder(1, PAIR)
    peer.wait(peer.call("send", "0,1", 5, 7, peer=0), 5, 7)
    own.wait(own.call("recv", "0,1", 10, 12, peer=1), 10, 12)
    peer.call("all_reduce", "0,1", 20, 30, blocks=True)
    own.call("all_reduce", "0,1", 14, 30, blocks=True)
    plan = plan_of(0, own, peer)
    # the receive comes 100 later; the peer had long gone on, and only the own lateness counts
    assert dues(plan, {0: 10, 2: 114}) == {0: 12, 2: 124}
    # the distance from the first call is kept: rank 1 is at the all-reduce 10 after it
    assert ArrivalTimer(plan).anchors(2) == (Anchor(0, False, 10),)


def test_overlap_slack_is_used_up_before_a_peer_is_late() -> None:
    own, peer = LogBuilder(0, PAIR), LogBuilder(1, PAIR)
    for builder in (own, peer):
        builder.call("barrier", "0,1", 0, 10, blocks=True)
        overlapped = builder.call("all_reduce", "0,1", 12, 20)
        # both compute until 50 and find the call over for 30
        builder.wait(overlapped, 50, 50)
        builder.call("all_reduce", "0,1", 55, 60, blocks=True)
    plan = plan_of(0, own, peer)
    # 25 later into the overlapped call, but back in time for the last: the peer found 5 of slack left
    assert dues(plan, {0: 0, 1: 37, 3: 55}) == {0: 10, 1: 45, 3: 60}
    # 50 later: over at 70, after the peer came to its wait at 50; it goes on at 70, and needs 5 more
    assert dues(plan, {0: 0, 1: 62, 3: 63}) == {0: 10, 1: 70, 3: 80}


def test_an_anchor_may_be_a_later_call_that_is_still_in_flight() -> None:
    own, peer = LogBuilder(0, PAIR), LogBuilder(1, PAIR)
    first = own.call("all_reduce", "0,1", 0, 30)
    second = own.call("all_reduce", "0,1#1", 10, 20)
    own.wait(first, 11, 30)
    own.wait(second, 30, 30)
    # the peer makes them in the other order, and waits in between
    peer.wait(peer.call("all_reduce", "0,1#1", 5, 20), 5, 20)
    peer.wait(peer.call("all_reduce", "0,1", 25, 30), 25, 30)
    plan = plan_of(0, own, peer)
    assert Anchor(second, True, 5) in ArrivalTimer(plan).anchors(first)
    # the second comes at 50 and ends at 60; the peer comes to the first at 65
    assert dues(plan, {first: 0, second: 50}) == {first: 70, second: 60}


def test_what_a_peer_queues_behind_hides_lateness() -> None:
    groups = {"0-2": (0, 1, 2), "0,1": (0, 1), "1,2": (1, 2)}
    ranks = [LogBuilder(rank, groups) for rank in range(3)]
    for builder in ranks:
        builder.call("barrier", "0-2", 0, 5, blocks=True)
    ranks[1].call("all_reduce", "1,2", 5, 100)
    ranks[0].call("all_reduce", "0,1", 45, 50, blocks=True)
    ranks[1].call("all_reduce", "0,1", 10, 50, blocks=True)
    ranks[1].wait(ranks[1].call("all_reduce", "1,2", 50, 110), 50, 110)
    ranks[2].call("all_reduce", "1,2", 5, 100)
    ranks[2].wait(ranks[2].call("all_reduce", "1,2", 6, 110), 6, 110)
    ranks[0].call("all_reduce", "0,1", 60, 120, blocks=True)
    ranks[1].call("all_reduce", "0,1", 115, 120, blocks=True)
    plan = plan_of(0, *ranks)
    # rank 1's second call with rank 2 cannot begin before their first ends, at 100
    assert dues(plan, {0: 0, 1: 65, 2: 75}) == {0: 5, 1: 70, 2: 120}
    # unless rank 1 comes to it later still: at 110, for 10, and 5 more to the last
    assert dues(plan, {0: 0, 1: 105, 2: 106}) == {0: 5, 1: 110, 2: 130}


def three_ranks(third_comes_ns: int) -> ArrivalPlan:
    """Rank 2 waits for rank 1, who waits for rank 0, before rank 0 meets rank 2."""
    groups = {"0,1": (0, 1), "1,2": (1, 2), "0,2": (0, 2)}
    ranks = [LogBuilder(rank, groups) for rank in range(3)]
    for rank, start in ((0, 10), (1, 5)):
        ranks[rank].call("all_reduce", "0,1", start, 20, blocks=True)
    end = max(22, third_comes_ns) + 8
    for rank, start in ((1, 22), (2, third_comes_ns)):
        ranks[rank].call("all_reduce", "1,2", start, end, blocks=True)
    for rank, start in ((0, 25), (2, end + 3)):
        ranks[rank].call("all_reduce", "0,2", start, end + 10, blocks=True)
    return plan_of(0, *ranks)


def test_lateness_reaches_a_peer_over_a_third_rank() -> None:
    plan = three_ranks(third_comes_ns=7)
    # rank 0 first comes at 10 and then stays with the second call for 100
    assert dues(plan, {0: 10, 1: 125})[1] == 132
    # its first call ends 50 later: rank 1 is 50 later, so is rank 2, who comes at 83
    late = dataclasses.replace(plan, transfer_ns=plan.transfer_ns + np.array([50, 0]))
    assert dues(late, {0: 10, 1: 25})[1] == 90


def test_a_third_rank_that_is_late_itself_hides_lateness() -> None:
    plan = three_ranks(third_comes_ns=28)
    for lateness, later in ((0, 0), (4, 0), (6, 0), (10, 4)):
        late = dataclasses.replace(plan, transfer_ns=plan.transfer_ns + np.array([lateness, 0]))
        assert dues(late, {0: 10, 1: 25})[1] == 46 + later


def test_a_broadcast_waits_for_its_root_alone() -> None:
    group = {"0-2": (0, 1, 2)}
    ranks = [LogBuilder(rank, group) for rank in range(3)]
    ranks[0].call("broadcast", "0-2", 10, 12, peer=0)  # the root goes ahead
    ranks[1].call("broadcast", "0-2", 5, 14, peer=0)
    ranks[2].call("broadcast", "0-2", 50, 52, peer=0)
    assert plan_of(1, *ranks).last_peer_ns.tolist() == [10]
    root = plan_of(0, *ranks)
    assert dues(root, {0: 70}) == {0: 72}


def test_an_uneven_all_to_all_is_no_barrier_where_it_was_none() -> None:
    group = {"0-2": (0, 1, 2)}
    ranks = [LogBuilder(rank, group) for rank in range(3)]
    for rank, start, end in ((0, 10, 30), (1, 20, 55), (2, 50, 56)):
        ranks[rank].call("all_to_all_single", "0-2", start, end, in_split_sizes=(rank, 1, 0))
    # rank 0 was done before rank 2 came, who had nothing for it; of the others it may have waited
    # for rank 1 only, and by most of what can be told (its one call) it does not wait for all
    plan = plan_of(0, *ranks)
    assert plan.end_ns.tolist() == [30]
    assert dues(plan, {0: 10}) == {0: 30}
    assert dues(plan, {0: 500}) == {0: 520}
    assert plan_of(1, *ranks).last_peer_ns.tolist() == [50]


def test_a_call_that_waits_mostly_waits_only_for_those_who_had_come() -> None:
    group = {"0-2": (0, 1, 2)}
    ranks = [LogBuilder(rank, group) for rank in range(3)]
    for base in (0, 1000, 2000):
        for rank, start in ((0, 10), (1, 20), (2, 30)):
            ranks[rank].call("all_to_all_single", "0-2", base + start, base + 40, blocks=True)
    for rank, start, end in ((0, 10, 30), (1, 20, 55), (2, 50, 56)):
        ranks[rank].call("all_to_all_single", "0-2", 3000 + start, 3000 + end, blocks=True)
    plan = plan_of(0, *ranks)
    assert plan.last_peer_ns.tolist() == [30, 1030, 2030, 3020]
    assert plan.transfer_ns.tolist() == [10, 10, 10, 10]


def test_a_batch_of_messages_has_one_time() -> None:
    group = {"0-2": (0, 1, 2)}
    ranks = [LogBuilder(rank, group) for rank in range(3)]
    for builder in ranks:
        builder.call("barrier", "0-2", 0, 5, blocks=True)
    ranks[0].call("recv", "0-2", 10, 47, peer=1, batch=0)
    ranks[0].wait(ranks[0].call("send", "0-2", 11, 47, peer=2, batch=0), 12, 47)
    ranks[1].call("send", "0-2", 20, 21, peer=0)
    ranks[2].call("recv", "0-2", 40, 47, peer=0)
    plan = plan_of(0, *ranks)
    assert plan.unit.tolist() == [0, 2, 2, -1]
    assert plan.basis.tolist() == [Basis.RECORDED] * 3 + [Basis.NOT_A_CALL]
    assert dues(plan, {0: 0, 1: 11, 2: 11}) == {0: 5, 1: 47, 2: 47}
    assert dues(plan, {0: 0, 1: 60, 2: 60}) == {0: 5, 1: 67, 2: 67}


def test_who_got_its_message_does_not_wait_for_the_rest_of_the_senders_batch() -> None:
    groups = {"0-2": (0, 1, 2), "0,1": (0, 1)}
    ranks = [LogBuilder(rank, groups) for rank in range(3)]
    for builder in ranks:
        builder.call("barrier", "0-2", 0, 5, blocks=True)
    ranks[0].call("recv", "0-2", 10, 47, peer=2, batch=0)
    ranks[0].call("send", "0-2", 11, 47, peer=1, batch=0)
    ranks[2].call("send", "0-2", 40, 47, peer=0)
    ranks[1].wait(ranks[1].call("recv", "0-2", 8, 15, peer=0), 8, 15)
    ranks[0].call("all_reduce", "0,1", 12, 30)
    ranks[1].call("all_reduce", "0,1", 20, 30)
    plan = plan_of(0, *ranks)
    # the batch starts 10 later and still ends at 47, for rank 2 comes at 40; rank 1 is 10 later
    assert dues(plan, {0: 0, 2: 21, 3: 22}) == {0: 5, 2: 47, 3: 40}


def test_peers_that_were_not_recorded_are_assumed_binding() -> None:
    own = LogBuilder(0, PAIR)
    own.call("all_reduce", "0,1", 10, 40, blocks=True)
    own.call("all_reduce", "0,1", 50, 54, blocks=True)  # the fastest: its transfer is 4 at most
    own.call("all_reduce", "0,1", 60, 90, blocks=True)
    plan = plan_of(0, own)
    assert plan.basis.tolist() == [Basis.PEERS_ASSUMED_BINDING] * 3
    assert plan.last_peer_ns.tolist() == [36, 50, 86]
    assert dues(plan, {0: 10, 1: 50, 2: 60}) == {0: 40, 1: 54, 2: 90}
    # faster: it waits for peers 32 after the second call; slower: they wait
    assert dues(plan, {0: 10, 1: 45, 2: 46}) == {0: 40, 1: 54, 2: 90}
    assert dues(plan, {0: 10, 1: 80, 2: 81}) == {0: 40, 1: 84, 2: 120}
    assert dues(plan, {0: 10, 1: 50, 2: 100}) == {0: 40, 1: 54, 2: 104}


def test_a_call_that_did_not_end_has_no_time() -> None:
    own = LogBuilder(0, PAIR)
    own.call("all_reduce", "0,1", 10, None)
    plan = plan_of(0, own)
    assert ArrivalTimer(plan).basis(0) is Basis.NOT_COMPLETED
    with pytest.raises(TraceIncompleteError, match="entry 0 of rank 0 did not end"):
        dues(plan, {0: 10})


def test_a_rank_that_was_not_recorded_has_no_plan() -> None:
    joined, binding = joined_of(LogBuilder(0, PAIR))
    assert plan_arrivals(joined, binding, 0).unit.tolist() == []
    with pytest.raises(KeyError):
        plan_arrivals(joined, binding, 1)


survivors = st.sampled_from(WORLD)


@given(recordings(), survivors, st.sampled_from([1, 2, UNBOUNDED]))
def test_at_the_recorded_pace_calls_end_at_their_recorded_times(
    logs: list[RankLog], survivor: int, max_terms: int
) -> None:
    joined = join(logs)
    plan = plan_arrivals(joined, bind(joined), survivor, max_terms=max_terms)
    arrived = by_entry(joined, survivor, joined.start_ns)
    assert dues(plan, arrived) == by_entry(joined, survivor, joined.end_ns)


@given(recordings(), survivors, st.integers(-(10**9), 10**9))
def test_a_constant_shift_shifts_everything(logs: list[RankLog], survivor: int, shift_ns: int) -> None:
    joined = join(logs)
    plan = plan_arrivals(joined, bind(joined), survivor)
    arrived = by_entry(joined, survivor, joined.start_ns + shift_ns)
    assert dues(plan, arrived) == by_entry(joined, survivor, joined.end_ns + shift_ns)


@given(recordings(), survivors)
def test_without_any_peer_recorded_the_recorded_pace_still_gives_the_recorded_times(
    logs: list[RankLog], survivor: int
) -> None:
    joined = join([logs[survivor]])
    plan = plan_arrivals(joined, bind(joined), survivor)
    arrived = by_entry(joined, survivor, joined.start_ns)
    assert dues(plan, arrived) == by_entry(joined, survivor, joined.end_ns)


@given(recordings(), survivors, st.data())
def test_another_pace_gives_what_the_whole_job_would_have_done(
    logs: list[RankLog], survivor: int, data: st.DataObject
) -> None:
    """The survivor alone, answered by the timer, against all four ranks simulated again with it changed."""
    joined = join(logs)
    assume(len(logs[survivor].entry) > 0)
    binding: Binding = bind(joined)
    [plan] = [s for s in again(joined, binding, survivor).schedules if s.rank == survivor]
    changes = st.lists(st.integers(-50, 100), min_size=len(plan.own_ns), max_size=len(plan.own_ns))
    change = np.array(data.draw(changes), np.int64)
    change[0] = 0  # before its first call nothing ties the others to it
    whole = again(joined, binding, survivor, np.maximum(plan.own_ns + change, 0))
    arrivals = plan_arrivals(joined, binding, survivor, max_terms=UNBOUNDED)
    arrived = by_entry(joined, survivor, whole.start_ns)
    assert dues(arrivals, arrived) == by_entry(joined, survivor, whole.end_ns)
