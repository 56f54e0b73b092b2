"""The diagnosis of jobs made by hand: each fault has its own answer, and a good job none."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from diagnose_samples import LATE, SECOND, HandMade

from ranklens_core.diagnose.findings import Diagnosis, Status
from ranklens_core.diagnose.job import How, RankState
from ranklens_core.diagnose.words import report


def test_a_good_job() -> None:
    job = HandMade(4, pair=(0, 1))
    job.all_reduce()
    job.call(0, "send", "pair", peer=1)
    job.call(1, "recv", "pair", peer=0)
    job.all_reduce()
    found = job.diagnosis()
    assert (found.status, found.exit_status, found.culprits) == (Status.OK, 0, ())
    assert report(found) == "Nothing found: all calls fit each other."


@pytest.mark.parametrize(
    ("op", "good", "bad", "field", "what"),
    [
        ("all_reduce", {}, {"reduce_op": "max"}, "reduce_op", "sum on ranks 0,1,3; max on rank 2"),
        ("all_reduce", {}, {"in_shapes": ((3,),), "out_shapes": ((3,),)}, "input elements",
         "2 on ranks 0,1,3; 3 on rank 2"),
        ("all_reduce", {}, {"in_dtypes": ("int8",)}, "dtype", "float32 on ranks 0,1,3; int8 on rank 2"),
        ("broadcast", {"peer": 0}, {"peer": 1}, "root", "0 on ranks 0,1,3; 1 on rank 2"),
        ("all_gather_into_tensor", {"out_shapes": ((8,),)}, {"out_shapes": ((6,),)}, "output elements",
         "8 on ranks 0,1,3; 6 on rank 2"),
        ("barrier", {}, {"op": "all_reduce"}, "op", "barrier on ranks 0,1,3; all_reduce on rank 2"),
    ],
)  # fmt: skip
def test_terms_that_differ(op: str, good: dict[str, Any], bad: dict[str, Any], field: str, what: str) -> None:
    job = HandMade(4)
    job.all_reduce(step=3)
    for rank in range(4):
        changes = good | (bad if rank == 2 else {})
        job.call(rank, changes.pop("op", op), line=20 + (rank == 2), done=False, step=3, **changes)
    job.killed()
    found = job.diagnosis()
    (disagreement,) = found.disagreements
    assert (found.status, found.exit_status, found.culprits) == (Status.STRUCTURE, 3, (2,))
    assert (disagreement.seq_id, disagreement.step, disagreement.odd) == (1, 3, (2,))
    assert disagreement.fields == ((field, what),)
    assert [party.ranks for party in disagreement.parties] == [(0, 1, 3), (2,)]
    assert [party.call.site for party in disagreement.parties] == ["train.py:20 main", "train.py:21 main"]
    assert found.answer.startswith("rank 2 made ")
    assert "train.py:21 main (call 1, step 3)" in found.answer


def test_shapes_may_differ_where_only_the_number_of_elements_counts() -> None:
    job = HandMade(2)
    job.call(0, "all_reduce", in_shapes=((2, 3),), out_shapes=((2, 3),))
    job.call(1, "all_reduce", in_shapes=((6,),), out_shapes=((6,),))
    assert job.diagnosis().status is Status.OK


def test_without_a_majority_nobody_is_blamed() -> None:
    job = HandMade(2)
    job.call(0, "all_reduce", line=1, done=False)
    job.call(1, "broadcast", line=2, peer=0, done=False)
    job.killed()
    found = job.diagnosis()
    assert (found.status, found.culprits) == (Status.STRUCTURE, ())
    assert found.answer == (
        "rank 0 made all_reduce sum float32[2] on (ranks world) at train.py:1 main (call 0, step 0) where "
        "rank 1 made broadcast float32[2] root 0 on (ranks world) at train.py:2 main (call 0, step 0)"
    )


def test_splits_fit_pair_by_pair() -> None:
    def exchange(splits: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> Diagnosis:
        job = HandMade(2)
        for rank, (sent, received) in enumerate(splits):
            job.call(
                rank,
                "all_to_all_single",
                in_split_sizes=sent,
                out_split_sizes=received,
                in_shapes=((sum(sent), 2),),
                out_shapes=((sum(received), 2),),
            )
        return job.diagnosis()

    assert exchange([((1, 2), (1, 4)), ((4, 0), (2, 0))]).status is Status.OK
    found = exchange([((1, 2), (1, 4)), ((4, 0), (3, 0))])
    assert found.status is Status.STRUCTURE
    assert found.disagreements[0].fields == (("elements from rank 0 to rank 1", "4 sent, 6 expected"),)
    assert "in splits [1, 2]" in report(found)


def test_a_message_of_another_dtype() -> None:
    job = HandMade(3)
    job.call(1, "send", peer=2, in_dtypes=("float32",), line=7)
    job.call(2, "recv", peer=1, out_dtypes=("bfloat16",), line=8, done=False)
    job.killed()
    found = job.diagnosis()
    assert found.status is Status.STRUCTURE
    assert found.disagreements[0].fields == (("dtype", "float32 sent, bfloat16 to be received"),)


def test_a_rank_that_ended_early() -> None:
    job = HandMade(4)
    job.all_reduce()
    for rank in (0, 1, 2):
        job.call(rank, "all_reduce", line=5, done=False)
    job.killed(0, 1, 2)
    found = job.diagnosis()
    assert (found.status, found.culprits) == (Status.HANG, (3,))
    (wait,) = found.waits
    assert (wait.ranks, wait.for_ranks, wait.reason) == ((0, 1, 2), (3,), "did not come to it")
    assert (wait.waited_ns, wait.certain) == (LATE - 10, True)
    assert found.answer.startswith("rank 3 ended (exit status 0) after all_reduce")


def test_a_rank_that_failed_and_what_it_did_to_the_others() -> None:
    job = HandMade(3)
    job.all_reduce()
    for rank in (0, 1):
        index = job.call(rank, "all_reduce", line=5, done=False)
        job.failed[rank, index] = "RuntimeError: Connection closed by peer"
        job.failed_with(rank, "RuntimeError: Connection closed by peer", peer_lost=True)
    job.failed_with(2, "ValueError: no label")
    found = job.diagnosis()
    assert (found.status, found.culprits) == (Status.HANG, (2,))
    assert found.answer == (
        "rank 2 failed with ValueError: no label at train.py:9 load; ranks 0,1 wait for it in all_reduce sum "
        "float32[2] on (ranks world) at train.py:5 main (call 1, step 0)"
    )


def test_a_rank_that_died_while_nobody_waited() -> None:
    job = HandMade(2)
    job.all_reduce()
    job.killed(0)
    job.failed_with(1, "MemoryError: ")
    found = job.diagnosis()
    assert (found.status, found.culprits, found.exit_status) == (Status.DIED, (1,), 3)


def test_both_send_first() -> None:
    job = HandMade(3)
    job.call(0, "send", peer=1, line=4, done=False)
    job.call(1, "send", peer=0, line=4, done=False)
    job.call(2, "recv", peer=1, line=6, done=False)
    job.killed()
    found = job.diagnosis()
    assert (found.status, found.cycle, found.culprits) == (Status.HANG, (0, 1), (0, 1))
    assert found.answer.startswith("deadlock: ranks 0,1 wait for each other: rank 0 in send")
    assert found.answer.endswith("; rank 2 waits for them")


def test_a_chain_of_waits_ends_at_the_rank_that_is_busy() -> None:
    job = HandMade(4, left=(0, 1), right=(1, 2))
    for rank in (0, 1, 2, 3):
        job.call(rank, "all_reduce")
    job.call(0, "all_reduce", "left", line=5, done=False)
    job.call(1, "all_reduce", "right", line=6, done=False)
    job.call(2, "recv", peer=3, line=7, done=False)
    job.killed()
    job.killed(3, place="data.py:17 next_batch")
    found = job.diagnosis()
    assert [(wait.ranks, wait.for_ranks) for wait in found.waits] == [
        ((0,), (1,)),
        ((1,), (2,)),
        ((2,), (3,)),
    ]
    assert found.culprits == (3,)
    assert found.answer == (
        "rank 3 did not send: it was at data.py:17 next_batch; rank 2 waits for it in recv float32[2] from 3 "
        "on (ranks world) at train.py:7 main (call 0, step 0), for 60.0 s when the recording ended, and "
        "ranks 0,1 behind them"
    )


def test_what_the_program_waited_for_counts_not_what_else_was_in_flight() -> None:
    job = HandMade(3)
    early = job.call(0, "recv", peer=1, done=False)
    job.call(0, "recv", peer=2, done=False)
    job.killed()
    job.killed(0, waiting=(early,))
    assert [wait.for_ranks for wait in job.diagnosis().waits] == [(1,)]


def test_a_transfer_that_everybody_came_to() -> None:
    job = HandMade(2)
    for rank in (0, 1):
        job.call(rank, "all_reduce", line=3, done=False)
    job.killed()
    found = job.diagnosis()
    assert (found.status, found.culprits) == (Status.HANG, ())
    assert "it did not end for 60.0 s: the transfer itself hangs" in found.answer


def test_a_job_that_was_killed_while_all_was_well() -> None:
    """What was recorded since the last flush is lost: a call that is not there may have been made."""
    job = HandMade(2)
    job.all_reduce()
    job.call(0, "all_reduce", at=5 * SECOND, done=False)
    job.killed(0, alive_ns=5 * SECOND + 200_000_000)
    job.killed(1, alive_ns=5 * SECOND)
    found = job.diagnosis()
    assert (found.status, found.exit_status, found.waits) == (Status.CUT_OFF, 0, ())
    assert found.answer.endswith("the recording of ranks 0,1 was cut off, nobody was seen to wait there")


def test_a_rank_that_fell_silent_before_the_others() -> None:
    job = HandMade(2)
    job.all_reduce()
    job.call(0, "all_reduce", at=5 * SECOND, done=False)
    job.killed(0)
    job.killed(1, alive_ns=5 * SECOND)
    found = job.diagnosis()
    assert (found.status, found.culprits) == (Status.HANG, (1,))
    assert "Likely, not certain" in found.answer


def test_a_rank_that_was_not_recorded() -> None:
    job = HandMade(3)
    job.states[2] = RankState(2, How.UNRECORDED)
    job.all_reduce((0, 1), done=False)
    job.killed(0, 1)
    found = job.diagnosis()
    assert found.culprits == (2,)
    assert found.answer.startswith("nothing is known of rank 2 (not recorded); ranks 0,1 wait for it")


def test_several_ranks_that_did_not_come() -> None:
    job = HandMade(4)
    job.all_reduce()
    job.all_reduce((0, 1), done=False)
    job.killed()
    found = job.diagnosis()
    assert found.culprits == (2, 3)
    assert "(likewise rank 3); ranks 0,1 wait for them in all_reduce" in found.answer
    job.failed_with(3, "ValueError: no label")
    assert job.diagnosis().culprits == (3,)


def test_two_circles_do_not_get_mixed_up() -> None:
    job = HandMade(5)
    for rank, peer in ((0, 1), (1, 0), (2, 3), (3, 2), (4, 3)):
        job.call(rank, "recv", peer=peer, done=False)
    job.killed()
    found = job.diagnosis()
    assert found.cycle == found.culprits == (2, 3)
    assert found.answer.endswith("; rank 4 waits for them")


# Which calls were left out.


def lag_of(odd: list[tuple[int, int]], others: list[tuple[int, int]]) -> str:
    """The lag when rank 2 makes all-reduces of (line, size) ``odd``, ranks 0 and 1 ``others``."""
    job = HandMade(3)
    for rank, calls in ((0, others), (1, others), (2, odd)):
        for at, (line, size) in enumerate(calls):
            shape = ((size,),)
            last = at == min(len(odd), len(others)) - 1
            job.call(rank, "all_reduce", line=line, in_shapes=shape, out_shapes=shape, done=not last)
    job.killed()
    return job.diagnosis().disagreements[0].lag


def test_a_call_left_out_shows_in_what_follows() -> None:
    step = [(1, 4), (2, 4), (3, 8)]
    lag = lag_of([*step, (1, 4), *step[2:], *step], step * 3)
    assert lag == (
        "rank 2 left out 1 call: number 4, all_reduce sum float32[4] on (ranks world) at train.py:2 main, "
        "step 0"
    )


def test_two_calls_too_many() -> None:
    step = [(1, 4), (2, 4), (3, 8)]
    lag = lag_of([*step, (7, 4), (8, 4), *step], [*step, *step])
    assert lag == (
        "rank 2 made 2 calls more than the others: from number 3, all_reduce sum float32[4] on (ranks world) "
        "at train.py:7 main, step 0"
    )


def test_where_all_stop_at_once_habit_tells() -> None:
    lag = lag_of([(1, 4), (2, 4), (3, 8), (1, 4), (3, 8)], [(1, 4), (2, 4), (3, 8), (1, 4), (2, 4)])
    assert lag.startswith("rank 2 left out 1 call: number 4, all_reduce sum float32[4]")


def test_a_batch_that_was_skipped() -> None:
    """All calls are alike: only their number at each line tells."""
    assert lag_of([(1, 4), (1, 4), (9, 1)], [(1, 4), (1, 4), (1, 4)]) == (
        "rank 2 has made 2 calls at train.py:1 main, the others 3"
    )


def test_steps_tell_where_all_calls_are_alike() -> None:
    job = HandMade(3)
    for step in range(3):
        for at in range(3):
            job.all_reduce((0, 1), step=step, done=(step, at) != (2, 2))
            if (step, at) != (1, 2):
                job.all_reduce((2,), step=step)
    job.killed(0, 1)
    found = job.diagnosis()
    assert found.culprits == (2,)
    assert "Rank 2 left out 1 call: number 5, all_reduce" in found.answer


# Values.


def test_a_result_that_is_another_on_one_rank() -> None:
    job = HandMade(4)
    for step in range(3):
        for rank in range(4):
            job.call(rank, "all_reduce", step=step, output=100 + step + (rank == 2 and step > 0))
    found = job.diagnosis()
    (value,) = found.values
    assert (found.status, found.exit_status, found.culprits) == (Status.VALUES, 4, (2,))
    assert (value.what, value.call.step, value.call.seq_id) == ("result", 1, 1)
    assert value.parties == ((0, 1, 3), (2,))
    assert (value.calls, value.deviating, found.values_compared) == (3, 2, 3)
    assert found.answer.startswith("rank 2 got another result than ranks 0,1,3 in all_reduce")


def test_a_message_that_changed_on_its_way() -> None:
    job = HandMade(2)
    job.call(0, "send", peer=1, input=5)
    job.call(1, "recv", peer=0, output=6)
    found = job.diagnosis()
    assert (found.status, found.values[0].what) == (Status.VALUES, "message")


def test_a_broadcast_gives_what_its_root_put_in() -> None:
    job = HandMade(2)
    job.call(0, "broadcast", peer=0, input=5, output=5)
    job.call(1, "broadcast", peer=0, output=6)
    assert job.diagnosis().values[0].parties == ((0,), (1,))


def test_an_input_that_was_the_same_everywhere_is_only_told() -> None:
    job = HandMade(3)
    for step in range(5):
        for rank in range(3):
            job.call(rank, "all_reduce", step=step, input=10 + step + 100 * (rank == 1 and step == 4))
    found = job.diagnosis()
    assert (found.status, found.exit_status) == (Status.OK, 0)
    assert [(value.what, value.odd, value.call.step) for value in found.values] == [("input", (1,), 4)]


def test_results_that_belong_to_each_rank_are_not_compared() -> None:
    job = HandMade(2)
    for rank in (0, 1):
        job.call(rank, "reduce_scatter_tensor", output=rank + 1)
    assert job.diagnosis().values == ()


# Times.


def test_who_comes_late() -> None:
    job = HandMade(3)
    for at in range(11):  # the first step does not count
        for rank in range(3):
            job.call(rank, "all_reduce", step=at, at=1000 * at + 300 * (rank == 1))
    found = job.diagnosis()
    (late,) = found.stragglers
    assert (late.rank, late.last, late.exchanges, late.waited_ns) == (1, 10, 10, 3000)
    assert late.span_ns == 9300
    assert "rank 1 came last to 10 of its 10 collectives" in report(found)
    assert "times: by hand" in report(found)


def test_the_diagnosis_is_plain_data() -> None:
    job = HandMade(2)
    job.call(0, "all_reduce", done=False)
    job.killed(0)
    found = job.diagnosis()
    assert msgspec.json.decode(msgspec.json.encode(found), type=Diagnosis) == found
