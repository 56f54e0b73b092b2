"""A store without peers: what this rank has set, torch's barriers, and loops that would never end."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from conftest import RunCli

from ranklens_core.c10d.patience import MAX_ASKS, MAX_NS, TELL_ASKS, Patience, StuckProgram
from ranklens_core.c10d.store import OneRankStore
from ranklens_core.clock import ManualClock
from ranklens_core.errors import UnsupportedError

SECOND_NS = 1_000_000_000


def test_store_has_what_this_rank_has_set() -> None:
    store = OneRankStore()
    store.set("text", "value")
    store.set("bytes", b"\x00\xff")
    assert store.get("bytes") == b"\x00\xff"
    assert store.multi_get(["text", "bytes"]) == [b"value", b"\x00\xff"]
    assert store.check(["text"])
    assert not store.check(["text", "other"])
    assert [store.add("count", 2), store.add("count", -5)] == [2, -3]
    assert store.get("count") == b"-3"
    store.append("text", "+")
    assert store.get("text") == b"value+"
    store.multi_set(["a", "b"], ["1", b"2"])
    assert store.get("b") == b"2"
    assert store.num_keys() == 5
    assert store.delete_key("a")
    assert not store.delete_key("a")
    store.wait(["text"])
    store.wait(["text"], timedelta(seconds=1))
    store.set_timeout(timedelta(seconds=3))
    assert store.timeout == timedelta(seconds=3)
    assert store.has_extended_api()


def test_store_compares_and_sets_as_torchs_does() -> None:
    """Side by side with torch's own."""

    def run(store: dist.Store) -> list[bytes]:
        found = [store.compare_set("key", "", "first")]
        found.append(store.compare_set("key", "other", "second"))
        found.append(store.compare_set("key", "first", "third"))
        found.append(store.get("key"))
        return found

    assert run(OneRankStore()) == run(dist.HashStore())


def test_store_under_a_prefix_by_torchs_own_code() -> None:
    """C++ calls back into the Python store."""
    store = OneRankStore()
    prefixed = dist.PrefixStore("group", store)
    prefixed.set("key", "value")
    assert prefixed.get("key") == b"value"
    assert store.get("group/key") == b"value"
    assert prefixed.add("count", 1) == 1
    prefixed.wait(["key"])
    assert prefixed.check(["key"])


@pytest.mark.parametrize("ask", ["get", "wait", "multi_get"])
def test_key_that_only_a_peer_sets_is_an_error_not_a_hang(ask: str) -> None:
    store = OneRankStore()
    with pytest.raises(
        UnsupportedError, match=r"'from rank 0', which only a peer would set.*broadcast"
    ) as caught:
        getattr(store, ask)("from rank 0" if ask == "get" else ["from rank 0"])
    assert caught.value.exit_status == 6


@pytest.mark.parametrize("prefixed", [False, True])
def test_a_barrier_by_store_is_passed(prefixed: bool) -> None:
    """Also where torch's C++ makes it of counts and waits."""
    store = OneRankStore()
    (dist.PrefixStore("group", store) if prefixed else store).barrier("epoch", 8)
    with pytest.raises(UnsupportedError, match="'other/last_member'"):
        store.wait(["other/last_member"])


def test_queues_and_counts_of_keys_as_torchs() -> None:
    def run(store: dist.Store) -> list[object]:
        store.queue_push("queue", "1")
        store.queue_push("queue", "2")
        found: list[object] = [store.queue_len("queue"), store.check(["queue"]), store.list_keys()]
        found += [store.queue_pop("queue"), store.queue_pop("queue", False), store.queue_len("queue")]
        with pytest.raises(dist.QueueEmptyError):
            store.queue_pop("queue", False)
        store.set("key", "value")
        return [*found, store.list_keys(), store.num_keys()]

    assert run(OneRankStore()) == run(dist.HashStore())
    assert dist.PrefixStore("group", OneRankStore()).num_keys() == 0
    with pytest.raises(UnsupportedError, match="'queue'"):
        OneRankStore().queue_pop("queue")


class Alone:
    """A store watched by a clock that moves by ``gap_ns`` and CPU time by ``work_ns`` with each look."""

    def __init__(self, gap_ns: int, work_ns: int = 0) -> None:
        self.clock = ManualClock(1)
        self.gap_ns, self.work_ns = gap_ns, work_ns
        self.calls = self.cpu_ns = self.looks = 0
        self.kept: list[UnsupportedError] = []
        patience = Patience(
            clock=self.clock,
            cpu_ns=lambda: self.cpu_ns,
            progress=lambda: self.calls,
            site=lambda: "train.py:7 main",
            on_stuck=self.kept.append,
        )
        self.store = OneRankStore(patience=patience)

    def look(self, ask: Callable[[OneRankStore], object], times: int) -> None:
        for _ in range(times):
            self.clock.advance(self.gap_ns)
            self.cpu_ns += self.work_ns
            self.looks += 1
            ask(self.store)


@pytest.mark.parametrize(
    ("ask", "question"),
    [
        (lambda store: store.add("k", 0), r"store.add\('k', 0\) gave 0"),
        (lambda store: store.check(["go", "k"]), r"store.check\(\['go', 'k'\]\) gave False"),
        (lambda store: store.get("mine"), r"store.get\('mine'\) gave b'1'"),
        (lambda store: store.compare_set("mine", "turn 5", "turn 6"), r"store.compare_set\('mine'"),
        (lambda store: store.num_keys(), r"store.num_keys\(\) gave 1"),
        (lambda store: dist.PrefixStore("p", store).check(["go"]), r"store.check\(\['p/go'\]\)"),
    ],
)
def test_a_loop_that_no_peer_will_end_is_an_error(
    ask: Callable[[OneRankStore], object], question: str, caplog: pytest.LogCaptureFixture
) -> None:
    alone = Alone(SECOND_NS)
    alone.store.set("mine", "1")
    with (
        caplog.at_level(logging.WARNING, "ranklens"),
        pytest.raises(UnsupportedError, match=rf"at train.py:7 main\): {question}.* 100 times in 99 s"),
    ):
        alone.look(ask, 1000)
    assert alone.looks == MAX_ASKS
    assert [str(error) for error in alone.kept]
    assert [record.getMessage().count("seems to wait for a peer") for record in caplog.records] == [1]
    # a program that catches it and goes on asking, whatever it asks, cannot go on for ever
    with pytest.raises(StuckProgram) as left:
        alone.store.check(["something else"])
    assert left.value.code == 6


def test_a_busy_loop_is_given_up_by_time() -> None:
    alone = Alone(MAX_NS // 1000, work_ns=50_000)
    with pytest.raises(UnsupportedError, match=r"1001 times in 60 s"):
        alone.look(lambda store: store.check(["go"]), 5000)


def test_a_missing_key_that_the_program_asks_for_again_and_again_ends_it() -> None:
    alone = Alone(SECOND_NS)

    def stubborn(store: OneRankStore) -> None:
        try:
            store.get("from rank 0")
        except Exception:
            assert not alone.kept or alone.looks == MAX_ASKS

    with pytest.raises(StuckProgram):
        alone.look(stubborn, 1000)
    assert (alone.looks, "'from rank 0'" in str(alone.kept[0])) == (MAX_ASKS + 1, True)


def count_up(alone: Alone) -> Callable[[OneRankStore], object]:
    return lambda store: store.add("k", 1)


def train(alone: Alone) -> Callable[[OneRankStore], object]:
    def ask(store: OneRankStore) -> bool:
        alone.calls += alone.looks % 50 == 0
        return store.check(["abort"])

    return ask


def work(alone: Alone) -> Callable[[OneRankStore], object]:
    alone.work_ns = SECOND_NS // 2
    return lambda store: store.check(["abort"])


def answer_changes(alone: Alone) -> Callable[[OneRankStore], object]:
    return lambda store: (store.set("at", str(alone.looks)), store.get("at"))


@pytest.mark.parametrize("program", [count_up, train, work, answer_changes])
def test_a_program_that_goes_on_is_left_alone(
    program: Callable[[Alone], Callable[[OneRankStore], object]],
) -> None:
    alone = Alone(SECOND_NS)
    alone.look(program(alone), 1000)
    assert not alone.kept


def test_another_thread_than_the_main_one_may_wait(caplog: pytest.LogCaptureFixture) -> None:
    """A watchdog that waits for an abort is no hang; it is told all the same."""
    alone = Alone(SECOND_NS)
    thread = threading.Thread(target=alone.look, args=(lambda store: store.check(["abort"]), 1000))
    with caplog.at_level(logging.WARNING, "ranklens"):
        thread.start()
        thread.join()
    assert (alone.looks, alone.kept) == (1000, [])
    assert len(caplog.records) == 1
    assert f"{TELL_ASKS + 1} times in 10 s" in caplog.records[0].getMessage()


POLL = """
import torch, torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store
from ranklens_core.c10d import patience
patience.MAX_NS = 0  # the test shall not wait
dist.init_process_group("gloo")
store = _get_default_store()
dist.all_reduce(torch.ones(2))
store.add("arrived", 1)
try:
    {wait}
except Exception as error:
    print("swallowed", type(error).__name__, flush=True)
    {wait}
dist.all_reduce(torch.ones(2))
"""


@pytest.mark.parametrize(
    ("wait", "says"),
    [
        ("while store.add('arrived', 0) < 2: pass", "store.add('default_pg/0//arrived', 0) gave 1 100 times"),
        (
            "while int(store.get('arrived')) < 2: pass",
            "store.get('default_pg/0//arrived') gave b'1' 100 times",
        ),
    ],
)
def test_a_replay_that_polls_ends_and_says_why(wait: str, says: str, run_cli: RunCli, tmp_path: Path) -> None:
    (tmp_path / "poll.py").write_text(POLL.format(wait=wait))
    assert run_cli("record", "--nproc", "2", "--out", "trace", "--", "poll.py").returncode == 0
    replayed = run_cli("replay", "trace", "--rank", "0", "--", "poll.py")
    assert (replayed.returncode, replayed.stdout) == (6, "swallowed UnsupportedError\n"), replayed.stderr
    assert "1 of 2 calls match" in replayed.stderr
    assert says in replayed.stderr
    assert "poll.py:11 <module>" in replayed.stderr


def test_a_replay_that_waits_for_a_peers_key_ends_and_names_the_line(run_cli: RunCli, tmp_path: Path) -> None:
    wait = "store.set(str(dist.get_rank()), ''); store.wait(['1'])"
    (tmp_path / "poll.py").write_text(POLL.format(wait=wait))
    assert run_cli("record", "--nproc", "2", "--out", "trace", "--", "poll.py").returncode == 0
    replayed = run_cli("replay", "trace", "--rank", "0", "--", "poll.py")
    assert replayed.returncode == 6, replayed.stderr
    assert "poll.py:14 <module>) waits for the store key 'default_pg/0//1'" in replayed.stderr
    assert run_cli("replay", "trace", "--rank", "1", "--", "poll.py").returncode == 0
