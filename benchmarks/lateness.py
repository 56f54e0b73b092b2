"""Does a result arrive when it is due, and what does keeping time cost a call; in one run on this machine.

    python benchmarks/lateness.py                     about a minute on two cores

* lateness: results due at random moments, delivered by the engine's thread (nobody waits) or by the program's
  (it waits): delivered minus due. The machine must be idle; on a busy one this measures the other work.
* cost: a 2-rank gloo job of small collectives is recorded, then one rank of it replayed alone: with task
  ``profile``, with ``debug`` that compares nothing, and with ``structure``, by turns. CPU time of the thread
  that makes the calls, median over the rounds. ``work`` is what computing when a call is due adds, seen with
  a clock that jumps instead of sleeping; ``added`` is all that keeping time adds, sleeping included (the real
  job's rank slept too). What a bare sleep costs on this machine is printed with it.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ranklens_core.clock import Clock

LATE_AIM_US = 200.0
COST_AIM_US = 40.0
CALLS = 500
"""Calls of a kind in one replay."""
WARM_UP = 50


def lateness(results: int, *, waited: bool) -> tuple[float, float, float]:
    """p50, p99 and maximum in us of ``results`` deliveries, 0.2 to 3 ms apart."""
    from ranklens_core.clock import MonotonicClock
    from ranklens_core.completion.cpu import CpuEngine, tighten_timers

    clock, chance = MonotonicClock(), random.Random(0)
    engine = CpuEngine(clock)
    tighten_timers()
    arrived = threading.Event()
    for _ in range(results):
        arrived.clear()
        completion = engine.submit(clock.now_ns() + chance.randrange(200_000, 3_000_000), arrived.set)
        if waited:
            engine.wait_for(completion)
        else:
            arrived.wait()
    late = engine.lateness()
    engine.close()
    return late.p50_ns / 1e3, late.p99_ns / 1e3, late.max_ns / 1e3


def kinds() -> dict[str, Callable[[], None]]:
    """A small call of each kind."""
    import torch
    import torch.distributed as dist

    one, two = torch.ones(16), torch.ones(32)

    def all_reduce() -> None:
        dist.all_reduce(one)

    def all_gather() -> None:
        dist.all_gather_into_tensor(two, one)

    def asynchronous() -> None:
        work = dist.all_reduce(one, async_op=True)
        assert work is not None
        work.wait()

    return {
        "all_reduce": all_reduce,
        "all_gather_into_tensor": all_gather,
        "all_reduce, async_op and wait": asynchronous,
    }


def make_calls() -> dict[str, float]:
    """CPU us a call of the calling thread, by kind."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    took = {}
    for name, call in kinds().items():
        for _ in range(WARM_UP):
            call()
        begin_ns = time.thread_time_ns()
        for _ in range(CALLS):
            call()
        took[name] = (time.thread_time_ns() - begin_ns) / CALLS / 1e3
    dist.destroy_process_group()
    return took


def record_rank(directory: Path, rank: int) -> int:
    import ranklens_core as ranklens

    with ranklens.record(directory):
        make_calls()
    return 0


def jumping_clock() -> Clock:
    """A clock that is where a sleeper wants it to be, at once."""
    from ranklens_core.clock import MonotonicClock

    class Jumping(MonotonicClock):
        ahead_ns = 0

        def now_ns(self) -> int:
            return time.monotonic_ns() + self.ahead_ns

        def sleep_until(self, due_ns: int) -> None:
            self.ahead_ns += max(0, due_ns - self.now_ns())

    return Jumping()


def bare_sleep_us() -> float:
    """CPU us of a sleep of 300 us, timer slack out of the way."""
    from ranklens_core.completion.cpu import tighten_timers

    tighten_timers()
    begin_ns = time.thread_time_ns()
    for _ in range(1000):
        time.sleep(300e-6)
    return (time.thread_time_ns() - begin_ns) / 1e6


def replay_rank(directory: Path, rounds: int, rank: int) -> int:
    """Replays rank 0 with each task by turns and prints what keeping time adds."""
    from ranklens_core.replay_session import ReplaySession
    from ranklens_core.task import TASKS
    from ranklens_core.trace import open_trace

    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    tasks = {
        "profile": (TASKS["profile"], None),
        "no sleep": (TASKS["profile"], jumping_clock()),
        "debug without compare": (replace(TASKS["debug"], compares=False), None),
        "structure": (TASKS["structure"], None),
    }
    found: dict[str, dict[str, list[float]]] = {name: {} for name in tasks}
    for _ in range(rounds):
        for name, (task, clock) in tasks.items():
            session = ReplaySession(open_trace(directory), 0, task, clock=clock)
            try:
                took = make_calls()
            finally:
                verdict = session.close()
            if verdict.status != "ok":
                raise SystemExit(f"{name}: {verdict.status} {verdict.message}")
            for kind, cpu_us in took.items():
                found[name].setdefault(kind, []).append(cpu_us)
    header = f"{'profile':>9}{'debug*':>9}{'structure':>11}{'work':>9}{'added':>9}"
    print(f"\n{'CPU us a call':<32}{header}   (* no compare)")
    worst = 0.0
    for kind in found["profile"]:
        profile, unslept, debug, structure = (median(found[name][kind]) for name in tasks)
        worst = max(worst, profile - debug)
        print(
            f"{kind:<32}{profile:>9.1f}{debug:>9.1f}{structure:>11.1f}"
            f"{unslept - debug:>+9.1f}{profile - debug:>+9.1f}"
        )
    print(f"a bare sleep of 300 us costs {bare_sleep_us():.1f} us of CPU")
    print(f"keeping time adds at most {worst:.1f} us a call (aim: {COST_AIM_US:.0f})", flush=True)
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--results", type=int, default=5000, help="deliveries of each kind")
    parser.add_argument("--rounds", type=int, default=5, help="replays with each task")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    from ranklens_core.cluster import run_local

    print(f"load average before the start {os.getloadavg()[0]:.2f}")
    print(f"{'late by, us':<32}{'p50':>9}{'p99':>9}{'most':>9}")
    worst = 0.0
    for name, waited in (
        ("delivered by the engine's thread", False),
        ("delivered to a thread that waits", True),
    ):
        p50, p99, most = lateness(args.results, waited=waited)
        worst = max(worst, p99)
        print(f"{name:<32}{p50:>9.1f}{p99:>9.1f}{most:>9.1f}", flush=True)
    print(f"p99 at most {worst:.1f} us (aim: {LATE_AIM_US:.0f})", flush=True)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name) / "trace"
        recorded = run_local(2, partial(record_rank, directory), preimport=("torch",))
        if recorded.status:
            return recorded.status
        return run_local(1, partial(replay_rank, directory, args.rounds), preimport=("torch",)).status


if __name__ == "__main__":
    sys.exit(main())
