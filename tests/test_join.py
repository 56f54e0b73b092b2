"""Pairing calls across ranks."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
import trace_samples as samples
from hypothesis import given
from hypothesis import strategies as st
from timing_samples import LogBuilder, recordings, signature

from ranklens_core.errors import TraceDamagedError
from ranklens_core.schema import WaitRow
from ranklens_core.timing.join import Joined, join
from ranklens_core.timing.ranklog import NO_TIME, RankLog, read_logs
from ranklens_core.trace import open_trace

GROUPS = {"0-2": (0, 1, 2), "0,2": (0, 2)}


def exchanges(joined: Joined) -> set[frozenset[tuple[int, int]]]:
    """Each exchange as its members' (rank, entry)."""
    pairs = list(zip(joined.rank.tolist(), joined.entry.tolist(), strict=True))
    return {
        frozenset(pairs[row] for row in joined.members[joined.offsets[e] : joined.offsets[e + 1]])
        for e in range(joined.n_exchanges)
    }


def test_collectives_pair_by_group_and_number() -> None:
    builders = [LogBuilder(rank, GROUPS) for rank in range(3)]
    for builder in builders:
        builder.call("all_reduce", "0-2", 0, 1)
    for rank in (0, 2):
        builders[rank].call("all_reduce", "0,2", 2, 3)
    for builder in builders:
        builder.call("barrier", "0-2", 4, 5)
    joined = join([builder.build() for builder in builders])
    assert exchanges(joined) == {
        frozenset({(0, 0), (1, 0), (2, 0)}),
        frozenset({(0, 1), (2, 1)}),
        frozenset({(0, 2), (1, 1), (2, 2)}),
    }
    assert joined.missing.tolist() == [0, 0, 0]


def test_ranks_and_calls_that_were_not_recorded_are_counted() -> None:
    first, last = LogBuilder(0, GROUPS), LogBuilder(2, GROUPS)
    for builder in (first, last):
        builder.call("all_reduce", "0-2", 0, 1)
    first.call("all_reduce", "0-2", 2, None)  # rank 2 ended before it came here
    joined = join([first.build(), last.build()])
    assert exchanges(joined) == {frozenset({(0, 0), (2, 0)}), frozenset({(0, 1)})}
    assert sorted(joined.missing.tolist()) == [1, 2]


def test_messages_pair_by_direction_and_order() -> None:
    left, right = LogBuilder(0, GROUPS), LogBuilder(2, GROUPS)
    left.call("send", "0-2", 0, 1, peer=2)
    left.call("recv", "0-2", 0, 1, peer=2)
    left.call("send", "0-2", 0, 1, peer=2)
    right.call("recv", "0-2", 0, 1, peer=0)
    right.call("recv", "0-2", 0, 1, peer=0)
    right.call("send", "0-2", 0, 1, peer=0)
    joined = join([left.build(), right.build()])
    assert exchanges(joined) == {
        frozenset({(0, 0), (2, 0)}),
        frozenset({(0, 2), (2, 1)}),
        frozenset({(0, 1), (2, 2)}),
    }


@pytest.mark.parametrize(
    ("device", "first_pairs_with"), [("cpu", 1), ("cuda", 0)], ids=["gloo tells tags apart", "NCCL does not"]
)
def test_tags(device: str, first_pairs_with: int) -> None:
    left, right = LogBuilder(0, GROUPS), LogBuilder(2, GROUPS)
    for tag in (7, 8):
        left.call("send", "0-2", 0, 1, peer=2, tag=tag, device=device)
    for tag in (8, 7):
        right.call("recv", "0-2", 0, 1, peer=0, tag=tag, device=device)
    joined = join([left.build(), right.build()])
    assert frozenset({(0, 0), (2, first_pairs_with)}) in exchanges(joined)


def test_receives_from_any_source_pair_by_where_the_message_came_from() -> None:
    ranks = [LogBuilder(rank, GROUPS) for rank in range(3)]
    ranks[0].call("send", "0-2", 0, 1, peer=1)
    ranks[0].call("send", "0-2", 0, 1, peer=1)
    ranks[2].call("send", "0,2", 0, 1, peer=0)
    ranks[2].call("send", "0-2", 0, 1, peer=1)
    ranks[1].call("recv_any_source", "0-2", 0, 1, src_rank=2)
    ranks[1].call("recv_any_source", "0-2", 0, 1, src_rank=0)
    ranks[1].call("recv", "0-2", 0, 1, peer=0)
    ranks[1].call("recv_any_source", "0-2", 0, None)
    joined = join([builder.build() for builder in ranks])
    assert exchanges(joined) == {
        frozenset({(2, 1), (1, 0)}),
        frozenset({(0, 0), (1, 1)}),
        frozenset({(0, 1), (1, 2)}),
        frozenset({(1, 3)}),
        frozenset({(2, 0)}),
    }


def test_a_coalescing_batch_of_collectives_is_one_exchange() -> None:
    builders = [LogBuilder(rank, GROUPS) for rank in (0, 2)]
    for builder in builders:
        builder.call("all_reduce", "0,2", 1, 9, batch=0)
        builder.call("all_reduce", "0,2", 3, 9, batch=0)
        builder.call("all_reduce", "0,2", 10, 11)
    joined = join([builder.build() for builder in builders])
    assert exchanges(joined) == {frozenset({(0, 1), (2, 1)}), frozenset({(0, 2), (2, 2)})}
    assert joined.exchange[0] == joined.exchange[1]
    assert joined.in_msg_bytes[1] == 16
    assert joined.unit[:3].tolist() == [1, 1, 2]
    assert joined.start_ns[:2].tolist() == [3, 3]  # nothing is launched before the last call


def test_messages_of_a_batch_stay_apart_and_complete_together() -> None:
    ranks = [LogBuilder(rank, GROUPS) for rank in range(3)]
    ranks[0].call("send", "0-2", 0, 1, peer=1)
    ranks[1].call("recv", "0-2", 1, 8, peer=0, batch=0)
    ranks[1].call("send", "0-2", 2, 8, peer=2, batch=0)
    ranks[2].call("recv", "0-2", 0, 8, peer=1)
    joined = join([builder.build() for builder in ranks])
    assert exchanges(joined) == {frozenset({(0, 0), (1, 0)}), frozenset({(1, 1), (2, 0)})}
    rows = joined.rows_of(1)
    assert joined.unit[rows].tolist() == [rows.stop - 1, rows.stop - 1]


def test_two_calls_in_one_place_are_damage() -> None:
    builder = LogBuilder(0, GROUPS)
    builder.call("all_reduce", "0-2", 0, 1)
    builder.call("all_reduce", "0-2", 0, 1, seq_id=0)
    with pytest.raises(TraceDamagedError, match="rank 0 has two calls number 0 of group 0-2"):
        join([builder.build()])


def test_nothing_joins_to_nothing() -> None:
    assert join([]).n_exchanges == 0
    assert join([LogBuilder(0, GROUPS).build()]).n_exchanges == 0


@given(recordings(), st.permutations(range(4)))
def test_the_order_of_the_logs_does_not_matter(logs: list[RankLog], order: list[int]) -> None:
    joined, other = join(logs), join([logs[place] for place in order])
    for name in ("rank", "entry", "exchange", "unit", "members", "offsets", "expected"):
        np.testing.assert_array_equal(getattr(joined, name), getattr(other, name))


def test_a_million_calls_join_in_seconds() -> None:
    ranks, calls = 8, 125_000
    group = "0-7"
    entry = np.arange(calls)
    zeros = np.zeros(calls, np.int64)
    empty = np.zeros(0, np.int64)
    logs = [
        RankLog(
            rank=rank,
            signatures=(signature("all_reduce", group),),
            groups={group: tuple(range(ranks))},
            entry=entry,
            seq_id=entry,
            batch=zeros - 1,
            src_rank=zeros - 1,
            **dict.fromkeys(("signature", "step", "compute_ns", "compute_cpu_ns"), zeros),
            **dict.fromkeys(("enqueue_ns", "start_ns", "end_ns", "return_ns"), 10 * entry),
            **dict.fromkeys(("wait_entry", "wait_call", "wait_begin_ns", "wait_end_ns"), empty),
            **dict.fromkeys(("wait_compute_ns", "wait_compute_cpu_ns"), empty),
        )
        for rank in range(ranks)
    ]
    begin = time.perf_counter()
    joined = join(logs)
    assert time.perf_counter() - begin < 5
    assert joined.n_exchanges == calls
    assert not joined.missing.any()


def test_a_log_is_read_from_a_trace(tmp_path: Path) -> None:
    writer = samples.new_writer(tmp_path / "run")
    writer.group(samples.GROUP)
    writer.signature(samples.SIGNATURE)
    writer.call(samples.call(0))
    writer.completion(samples.completion(0, return_ns=8))
    writer.call(samples.call(1))
    writer.wait(WaitRow(entry=2, call=1, begin_ns=15, end_ns=18, compute_ns=3, compute_cpu_ns=2))
    writer.completion(samples.completion(1))
    writer.call(samples.call(3))
    writer.completion(samples.completion(3, error="RuntimeError: peer gone"))
    writer.call(samples.call(4))
    writer.close(0)
    with open_trace(tmp_path / "run") as trace:
        [log] = read_logs(trace)
    assert log.entry.tolist() == [0, 1, 3, 4]
    assert log.start_ns.tolist() == [1, 11, 31, 41]
    assert log.end_ns.tolist() == [7, 17, NO_TIME, NO_TIME]
    assert log.blocking.tolist() == [True, False, False, False]
    assert log.wait_call.tolist() == [1]
    assert log.observed_at().tolist() == [0, 2, 5, 5]
    assert log.groups == {samples.GROUP.key: samples.GROUP.ranks}
