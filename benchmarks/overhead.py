"""What recording and replaying cost, a call and an iteration, all in one run on this machine.

    python benchmarks/overhead.py                     about three minutes on two cores
    python benchmarks/overhead.py --only calls

Modes are switched inside one process, block by block, so that they share whatever else the machine does:

* calls: small collectives of a 2-rank gloo job: plain, recording metadata (``--payload none``), recording
  with values; on a group of both ranks, and on groups of one, where nobody waits for a peer and so nothing
  but work is measured; and of one rank alone: torch's ``fake`` group, replaying (task debug).
* iterations: ../shared/cases/deepspeed_zero.py (or our own ZeRO example where that is absent), 2 ranks: the
  same modes, and the plain job against itself, which shows how much of a difference is noise; and one rank
  of it alone, on ``fake`` groups (whose results are whatever was in memory) and replayed, by turns.

``wall`` is elapsed time; ``cpu`` the CPU time of the thread that makes the calls, the training's own, which
is the steadier of the two on a shared machine; ``all threads`` that of the process, with gloo's threads and
the trace writer's. Where ranks keep all cores busy, what the writer's thread takes is missing elsewhere and
shows up in ``wall``. Figures are medians; differences are medians of the differences to the plain block of
the same round.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import multiprocessing
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from ranklens_core.program import Program

REPOSITORY = Path(__file__).resolve().parents[1]
ZERO_CASE = REPOSITORY.parent / "shared" / "cases" / "deepspeed_zero.py"
NPROC = 2
PLAIN, AGAIN, METADATA, VALUES, FAKE, REPLAY = "plain", "plain again", "metadata", "values", "fake", "replay"
PAYLOAD = {METADATA: "none", VALUES: "all"}

METADATA_AIM_PCT, VALUES_AIM_PCT = 5.0, 15.0
CALL_AIM_US = 30.0
REPLAY_AIM = 4.0


class Sample(msgspec.Struct, frozen=True):
    """Times of one call or iteration in one block, in ns."""

    what: str
    mode: str
    round: int
    wall_ns: float
    cpu_ns: float
    process_cpu_ns: float = 0.0


# Calls.

CALLS_A_BLOCK = 400
CALL_ROUNDS = 15
ELEMENTS = 16
OF_ONE = " (group of one)"


def call_kinds(group: ProcessGroup | None) -> dict[str, Callable[[], None]]:
    """Small collectives on ``group`` (None: all ranks), 64 bytes a rank."""
    import torch
    import torch.distributed as dist

    small = torch.zeros(ELEMENTS)
    gathered = torch.zeros(ELEMENTS * dist.get_world_size(group))

    def all_reduce() -> None:
        dist.all_reduce(small, group=group)

    def all_gather() -> None:
        dist.all_gather_into_tensor(gathered, small, group=group)

    def all_reduce_async() -> None:
        dist.all_reduce(small, group=group, async_op=True).wait()

    def all_gather_async() -> None:
        dist.all_gather_into_tensor(gathered, small, group=group, async_op=True).wait()

    return {
        "all_reduce": all_reduce,
        "all_gather_into_tensor": all_gather,
        "all_reduce, async and wait": all_reduce_async,
        "all_gather_into_tensor, async and wait": all_gather_async,
    }


def time_calls(mode: str, number: int, group: ProcessGroup | None = None) -> list[Sample]:
    """A block of every kind of call."""
    samples = []
    for kind, call in call_kinds(group).items():
        what = f"{kind}{'' if group is None else OF_ONE}"
        for _ in range(20):
            call()
        gc.collect()
        wall, cpu = time.monotonic_ns(), time.thread_time_ns()
        for _ in range(CALLS_A_BLOCK):
            call()
        cpu, wall = time.thread_time_ns() - cpu, time.monotonic_ns() - wall
        samples.append(Sample(what, mode, number, wall / CALLS_A_BLOCK, cpu / CALLS_A_BLOCK))
    return samples


def record_calls(rank: int, directory: Path) -> list[Sample]:
    """In each of two ranks: plain and recorded blocks by turns."""
    import torch.distributed as dist

    from ranklens_core.session import record

    # one trace with the group's making in it, for the replays
    with record(directory / "calls"):
        dist.init_process_group("gloo")
        time_calls(VALUES, 0)
    of_one = dist.new_group([rank], use_local_synchronization=True)
    samples = []
    for number in range(CALL_ROUNDS):
        for mode in in_turn((PLAIN, METADATA, VALUES), number):
            dist.barrier()
            recording: AbstractContextManager[object] = nullcontext()
            if mode in PAYLOAD:
                recording = record(directory / f"calls-{number}-{mode}", payload=PAYLOAD[mode])
            with recording:
                samples += time_calls(mode, number)
                samples += time_calls(mode, number, of_one)
    dist.destroy_process_group()
    return samples


def replay_calls(_: int, directory: Path) -> list[Sample]:
    """One rank alone: blocks on torch's ``fake`` group and replayed blocks by turns."""
    import torch.distributed as dist
    import torch.testing._internal.distributed.fake_pg  # noqa: F401 registers the backend

    from ranklens_core.session import replay

    for name in ("RANK", "WORLD_SIZE"):
        del os.environ[name]
    samples = []
    for number in range(CALL_ROUNDS):
        for mode in in_turn((FAKE, REPLAY), number):
            if mode == FAKE:
                dist.init_process_group("fake", rank=0, world_size=NPROC, store=dist.HashStore())
                samples += time_calls(mode, number)
                dist.destroy_process_group()
            else:
                with replay(directory / "calls", 0):
                    dist.init_process_group("gloo")
                    samples += time_calls(mode, number)
                    dist.destroy_process_group()
    return samples


# Iterations.

ITERATIONS_A_BLOCK = 10
WARM_UP_ITERATIONS = 4  # of each block: sessions, threads, signatures and the pages of files are new
ITERATION_ROUNDS = 6
LONE_ROUNDS = 3
HIDDEN = 256


def zero_program(iterations: int) -> Program:
    """The ZeRO-3 program; told by the environment where it is the case program."""
    from ranklens_core.program import Program

    if ZERO_CASE.is_file():
        os.environ.update({"HIDDEN": str(HIDDEN), "STEPS": str(iterations), "ZERO_STAGE": "3"})
        return Program.parse([str(ZERO_CASE)])
    sizes = ["--hidden-size", str(HIDDEN), "--steps", str(iterations)]
    return Program.parse(["-m", "ranklens_deepspeed.examples.zero", *sizes])


class Stopwatch:
    """Stands in place of ``sys.stdout``: the program prints a line a step, which ends an iteration."""

    def __init__(self, blocks: Sequence[tuple[int, str]], session: Callable[[int, str], Any]) -> None:
        self._blocks = list(blocks)
        self._session = session
        self._running: Any = nullcontext()
        self._at = -ITERATIONS_A_BLOCK  # the program's own warm-up
        self.samples: list[Sample] = []
        self._begin = _times()

    def write(self, text: str) -> int:
        if "\n" in text:
            self._iteration_ended()
        return len(text)

    def flush(self) -> None:
        """Nothing is kept back."""

    def _iteration_ended(self) -> None:
        took = [now - then for now, then in zip(_times(), self._begin, strict=True)]
        block, place = divmod(self._at, ITERATIONS_A_BLOCK)
        if 0 <= block < len(self._blocks) and place >= WARM_UP_ITERATIONS:
            number, mode = self._blocks[block]
            self.samples.append(Sample("iteration", mode, number, *took))
        self._at += 1
        block, place = divmod(self._at, ITERATIONS_A_BLOCK)
        if place == 0:
            self._running.__exit__(None, None, None)
            self._running = nullcontext()
            if block < len(self._blocks):
                self._running = self._session(*self._blocks[block])
                self._running.__enter__()
        self._begin = _times()


def _times() -> tuple[int, int, int]:
    return time.monotonic_ns(), time.thread_time_ns(), time.process_time_ns()


def keep_memory() -> None:
    """Tell glibc to keep what the program frees: the page faults of getting it again differ from block to
    block by more than what is to be measured."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        for parameter in (M_TRIM_THRESHOLD, M_MMAP_THRESHOLD):
            libc.mallopt(parameter, 1 << 30)


M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h


def run_watched(program: Program, watch: Stopwatch, session: AbstractContextManager[object]) -> None:
    """``program`` inside ``session``, its standard output into ``watch``."""
    keep_memory()
    stdout, sys.stdout = sys.stdout, watch
    try:
        with session:
            program.run()
    finally:
        sys.stdout = stdout


def record_iterations(rank: int, directory: Path) -> list[Sample]:
    """In each of two ranks: the program, recorded in some of its iterations."""
    from ranklens_core.session import record

    def session(number: int, mode: str) -> AbstractContextManager[object]:
        if mode not in PAYLOAD:
            return nullcontext()
        return record(directory / f"iterations-{number}-{mode}", payload=PAYLOAD[mode])

    modes = (PLAIN, METADATA, VALUES, AGAIN)
    blocks = [(number, mode) for number in range(ITERATION_ROUNDS) for mode in in_turn(modes, number)]
    watch = Stopwatch(blocks, session)
    run_watched(zero_program(ITERATIONS_A_BLOCK * (len(blocks) + 1)), watch, nullcontext())
    return watch.samples


def record_job(rank: int, directory: Path) -> list[Sample]:
    """In each of two ranks: the trace that ``lone_iterations`` replays."""
    from ranklens_core.session import record

    with record(directory / "job", payload="0"):
        zero_program(2 * ITERATIONS_A_BLOCK).run()
    return []


def lone_iterations(mode: str, number: int, rank: int, directory: Path) -> list[Sample]:
    """Rank 0 alone, on fake groups or replayed."""
    from ranklens_core.c10d.world import OneRankWorld
    from ranklens_core.session import replay

    watch = Stopwatch([(number, mode)], lambda *_: nullcontext())
    program = zero_program(2 * ITERATIONS_A_BLOCK)
    os.environ["WORLD_SIZE"] = str(NPROC)
    if mode == REPLAY:
        run_watched(program, watch, replay(directory / "job", 0))
    else:
        world = OneRankWorld(0, NPROC)
        run_watched(program, watch, nullcontext())
        world.remove()
    return watch.samples


# Running and comparing.


def in_turn(modes: Sequence[str], number: int) -> list[str]:
    """``modes`` in another order every round: none is always the first after a pause."""
    shift = number % len(modes)
    return [*modes[shift:], *modes[:shift]]


def run_ranks(
    nproc: int, measure: Callable[[int, Path], list[Sample]], directory: Path, preimport: Sequence[str] = ()
) -> list[Sample]:
    """``measure(rank, directory)`` in forked ranks; rank 0's samples."""
    samples_file, log_file = directory / "samples.json", directory / "log.txt"

    def target(rank: int) -> int:
        warnings.simplefilter("ignore")  # torch renames its collectives and says so once a process
        samples = measure(rank, directory)
        if rank == 0:
            samples_file.write_bytes(msgspec.json.encode(samples))
        return 0

    def launch() -> None:
        from ranklens_core.cluster import run_local

        log = os.open(log_file, os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
        for fd in (1, 2):
            os.dup2(log, fd)
        names = ["torch", "torch._dynamo", "ranklens_core.session", *preimport]
        sys.exit(run_local(nproc, target, preimport=names).status)

    # a process that has no torch forks one that has: this one stays as it is for the next measurement
    process = multiprocessing.get_context("fork").Process(target=launch)
    process.start()
    process.join()
    if process.exitcode != 0:
        print(log_file.read_text(errors="replace"), file=sys.stderr)
        sys.exit(f"a measurement ended with status {process.exitcode}; its output is above")
    return msgspec.json.decode(samples_file.read_bytes(), type=list[Sample])


@dataclass(frozen=True)
class Cost:
    """One mode: medians over its blocks, and of the differences to the plain block of the round, in ns."""

    wall_ns: float
    cpu_ns: float
    process_cpu_ns: float
    more_wall_ns: float
    more_cpu_ns: float
    more_process_cpu_ns: float


def costs(samples: Sequence[Sample], what: str, plain: str) -> dict[str, Cost]:
    """By mode, for ``what``."""
    blocks: dict[tuple[str, int], list[Sample]] = {}
    for sample in samples:
        if sample.what == what:
            blocks.setdefault((sample.mode, sample.round), []).append(sample)
    times = {key: _medians(block) for key, block in blocks.items()}
    result = {}
    for mode in dict.fromkeys(mode for mode, _ in times):
        mine = {number: time for (other, number), time in times.items() if other == mode}
        more = [[a - b for a, b in zip(mine[n], times[plain, n], strict=True)] for n in mine]
        result[mode] = Cost(
            *map(median, zip(*mine.values(), strict=True)), *map(median, zip(*more, strict=True))
        )
    return result


def _medians(block: Sequence[Sample]) -> tuple[float, float, float]:
    return (
        median(sample.wall_ns for sample in block),
        median(sample.cpu_ns for sample in block),
        median(sample.process_cpu_ns for sample in block),
    )


def print_calls(samples: Sequence[Sample]) -> None:
    print(f"\na call of 64 bytes, {NPROC} ranks of gloo: us, wall (cpu of the calling thread)")
    print(f"{'':<55}{'plain':>15}{'metadata adds':>16}{'values add':>16}")
    for what in dict.fromkeys(sample.what for sample in samples):
        by_mode = costs(samples, what, PLAIN)
        plain = by_mode[PLAIN]
        line = f"{what:<55}{plain.wall_ns / 1e3:>8.1f} ({plain.cpu_ns / 1e3:>4.1f})"
        for mode in (METADATA, VALUES):
            more = by_mode[mode]
            line += f"{more.more_wall_ns / 1e3:>9.1f} ({more.more_cpu_ns / 1e3:>4.1f})"
        print(line)
    print(f"aim: metadata adds less than {CALL_AIM_US:.0f} us")


def print_replays(samples: Sequence[Sample]) -> None:
    print("\nthe same call, one rank alone: us, wall (cpu)")
    print(f"{'':<40}{'fake group':>16}{'replaying':>18}{'times (cpu)':>16}")
    for what in dict.fromkeys(sample.what for sample in samples):
        by_mode = costs(samples, what, FAKE)
        fake, replay = by_mode[FAKE], by_mode[REPLAY]
        print(
            f"{what:<40}{fake.wall_ns / 1e3:>8.1f} ({fake.cpu_ns / 1e3:>4.1f})"
            f"{replay.wall_ns / 1e3:>10.1f} ({replay.cpu_ns / 1e3:>4.1f})"
            f"{replay.wall_ns / fake.wall_ns:>8.1f} ({replay.cpu_ns / fake.cpu_ns:>4.1f})"
        )
    print(f"aim: at most {REPLAY_AIM:.0f} times a fake group's call")


def print_iterations(samples: Sequence[Sample], plain_mode: str) -> None:
    by_mode = costs(samples, "iteration", plain_mode)
    plain = by_mode[plain_mode]
    print(f"{'':<16}{'wall':>10}{'adds':>16}{'cpu':>10}{'adds':>16}{'all threads':>14}{'adds':>16}")
    for mode, cost in by_mode.items():
        line = f"{mode:<16}"
        for width, took, more, of in (
            (10, cost.wall_ns, cost.more_wall_ns, plain.wall_ns),
            (10, cost.cpu_ns, cost.more_cpu_ns, plain.cpu_ns),
            (14, cost.process_cpu_ns, cost.more_process_cpu_ns, plain.process_cpu_ns),
        ):
            line += f"{took / 1e6:>{width}.1f}{more / 1e6:>+8.1f} {100 * more / of:>+6.1f}%"
        print(line)
    spread = sorted(sample.wall_ns for sample in samples if sample.mode == plain_mode)
    low, high = spread[len(spread) // 4], spread[3 * len(spread) // 4]
    print(f"half of the {len(spread)} {plain_mode} iterations took {low / 1e6:.1f} to {high / 1e6:.1f} ms")


def measure_iterations(directory: Path) -> None:
    name = ZERO_CASE.name if ZERO_CASE.is_file() else "ranklens_deepspeed.examples.zero"
    print(f"\nan iteration of {name}, ZeRO-3, hidden size {HIDDEN}, {NPROC} ranks: ms", flush=True)
    print_iterations(run_ranks(NPROC, record_iterations, directory, ["deepspeed"]), PLAIN)
    print(f"aim: metadata adds at most {METADATA_AIM_PCT:.0f}%, values at most {VALUES_AIM_PCT:.0f}%")
    print("\nan iteration of its rank 0 alone: ms", flush=True)
    run_ranks(NPROC, record_job, directory, ["deepspeed"])
    samples: list[Sample] = []
    for number in range(LONE_ROUNDS):
        for mode in in_turn((FAKE, REPLAY), number):
            measure = partial(lone_iterations, mode, number)
            samples += run_ranks(1, measure, directory, ["deepspeed"])
    print_iterations(samples, FAKE)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=["calls", "iterations"])
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("PYTHONWARNINGS", "ignore")
    load = os.getloadavg()[0]
    print(f"{os.cpu_count()} cores, load average before the start {load:.2f}", flush=True)
    with tempfile.TemporaryDirectory(prefix="ranklens-overhead-") as temporary:
        directory = Path(temporary)
        if arguments.only != "iterations":
            print_calls(run_ranks(NPROC, record_calls, directory))
            print_replays(run_ranks(1, replay_calls, directory))
        if arguments.only != "calls":
            measure_iterations(directory)
    return 0


if __name__ == "__main__":
    sys.exit(main())
