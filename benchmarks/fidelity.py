"""Record whole jobs, replay their ranks alone, and compare everything: programs x ranks, all must be 100%.

    python benchmarks/fidelity.py                     every row of _fidelity_rows.py
    python benchmarks/fidelity.py --quick             rows of up to 8 ranks
    python benchmarks/fidelity.py --only zero --ranks 0,3

Each row is recorded by ``ranklens record`` in processes of its own, then its ranks are replayed by what
``ranklens replay`` runs, forked from one process that has imported the frameworks once. Columns:

* calls: communication calls recorded for the rank, and how many of them the replay matched;
* training, values: the same of training calls, and of their inputs whose bits were compared;
* losses: lines with losses and gradient norms printed by the replay, against the lines that this
  rank printed while it was recorded (compared here, not taken from the verdict).

The programs of ../shared/cases lie beside the repository; where they do not, only our own are run.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
from _fidelity_rows import DIRECTORY, NOT_ON_CPU, ROWS, Row

from ranklens_core.printed import metrics_in
from ranklens_core.verdict import Status, Verdict

RECORD = (sys.executable, "-m", "ranklens_core", "record")
QUICK_NPROC = 8
TIMEOUT_S = 900


@dataclass(frozen=True)
class RankResult:
    """One rank's replay: its verdict (None if it came to none), the metric lines of both runs."""

    rank: int
    verdict: Verdict | None
    lines_recorded: tuple[str, ...]
    lines_replayed: tuple[str, ...]

    @property
    def lines_equal(self) -> int:
        pairs = zip(self.lines_recorded, self.lines_replayed, strict=False)
        return sum(recorded == replayed for recorded, replayed in pairs)

    @property
    def is_perfect(self) -> bool:
        """Everything matched and equal, and there was something to match, compare and print."""
        verdict = self.verdict
        if verdict is None or verdict.status is not Status.OK:
            return False
        structure, values = verdict.structure, verdict.values
        return (
            0 < structure.total == structure.matched == verdict.calls.replayed
            and 0 < structure.training_total == structure.training_matched
            and 0 < values.compared == values.identical
            and verdict.provenance.result.get("synthesised", 0) == 0
            and 0 < len(self.lines_recorded) == len(self.lines_replayed) == self.lines_equal
        )


@dataclass(frozen=True)
class RowResult:
    row: Row
    ranks: tuple[RankResult, ...]
    record_s: float
    replay_s: float
    failure: str = ""

    @property
    def is_perfect(self) -> bool:
        return not self.failure and bool(self.ranks) and all(rank.is_perfect for rank in self.ranks)


def run(row: Row, ranks: Sequence[int], directory: Path) -> RowResult:
    """Record ``row`` and replay ``ranks`` of it; everything goes to ``directory``."""
    row = replace(row, program=tuple(part.replace(DIRECTORY, str(directory)) for part in row.program))
    trace = directory / "trace"
    started = time.monotonic()
    recorded = subprocess.run(
        [*RECORD, "--nproc", str(row.nproc), "--out", str(trace), "--", *row.program],
        env=_environment(row),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    record_s = time.monotonic() - started
    if recorded.returncode != 0:
        failure = f"record ended with status {recorded.returncode}:\n{_tail(recorded.stderr)}"
        return RowResult(row, (), record_s, 0.0, failure)
    started = time.monotonic()
    # this process stays free of torch: each row imports the frameworks in its own environment
    process = multiprocessing.get_context("fork").Process(target=_replay, args=(row, ranks, trace, directory))
    process.start()
    process.join(TIMEOUT_S)
    if process.is_alive():
        process.kill()
        process.join()
    replay_s = time.monotonic() - started
    failure = ""
    if process.exitcode != 0:
        log = directory / "replays.txt"
        text = log.read_text(errors="replace") if log.exists() else ""
        failure = f"replays ended with status {process.exitcode}:\n{_tail(text)}"
    results = [_result(rank, recorded.stdout, directory) for rank in ranks]
    return RowResult(row, tuple(results), record_s, replay_s, failure)


def _environment(row: Row) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", **row.env}


def _replay(row: Row, ranks: Sequence[int], trace: Path, directory: Path) -> None:
    """In a child process: replay all ``ranks`` at once, each in a fork of its own."""
    os.environ.update(_environment(row))
    from ranklens_core.cli.replay import replay_program
    from ranklens_core.cluster import run_local
    from ranklens_core.preimport import guess_preimports
    from ranklens_core.program import Program
    from ranklens_core.standin import cpu_cuda_context, wants_cpu_cuda

    program = Program.parse(row.program)
    imports = guess_preimports(program)

    def replay_one(index: int) -> int:
        # a replay is one plain process, no rank of the launcher that forked it
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            del os.environ[name]
        rank = ranks[index]
        replay_program(program, trace, rank, "debug", verdict_file=_verdict_file(directory, rank))
        return 0  # the verdict says how it went; another status would end the other replays

    def keep(index: int, stream: str, lines: bytes) -> None:
        if stream == "stdout":
            with open(_stdout_file(directory, ranks[index]), "ab") as file:
                file.write(lines)
        else:
            log.write(lines)

    with open(directory / "replays.txt", "wb") as log:
        for fd in (1, 2):
            os.dup2(log.fileno(), fd)
        with cpu_cuda_context(wants_cpu_cuda(False, imports)):
            result = run_local(
                len(ranks), replay_one, preimport=[*imports, "ranklens_core.session"], on_output=keep
            )
        if result.first_failure is not None:
            log.write(result.first_failure.describe().encode() + b"\n")
    sys.exit(result.status)


def _result(rank: int, recorded: str, directory: Path) -> RankResult:
    verdict_file, stdout_file = _verdict_file(directory, rank), _stdout_file(directory, rank)
    verdict = msgspec.json.decode(verdict_file.read_bytes(), type=Verdict) if verdict_file.exists() else None
    replayed = stdout_file.read_text() if stdout_file.exists() else ""
    return RankResult(rank, verdict, _metric_lines(recorded, rank), _metric_lines(replayed, rank))


def _metric_lines(output: str, rank: int) -> tuple[str, ...]:
    """What the programs print: ``rank R step S loss L grad_norm G``."""
    return tuple(
        line for line in output.splitlines() if line.startswith(f"rank {rank} step ") and metrics_in(line)
    )


def _verdict_file(directory: Path, rank: int) -> Path:
    return directory / f"verdict-{rank}.json"


def _stdout_file(directory: Path, rank: int) -> Path:
    return directory / f"stdout-{rank}.txt"


def _tail(text: str) -> str:
    return "\n".join(text.splitlines()[-30:])


# The table.

HEADER = f"{'program':<24}{'rank':>8}{'calls':>14}{'training':>14}{'values':>14}{'losses':>9}  "


def print_row(result: RowResult) -> None:
    """A line a rank, and what went wrong."""
    for rank in result.ranks:
        verdict = rank.verdict
        where = f"{result.row.name:<24}{rank.rank:>5}/{result.row.nproc:<2}"
        if verdict is None:
            print(f"{where}  came to no verdict")
            continue
        structure, values = verdict.structure, verdict.values
        print(
            where
            + f"{structure.matched:>7}/{structure.total:<6}"
            + f"{structure.training_matched:>7}/{structure.training_total:<6}"
            + f"{values.identical:>7}/{values.compared:<6}"
            + f"{rank.lines_equal:>5}/{len(rank.lines_recorded):<3}"
            + ("  100%" if rank.is_perfect else f"  {verdict.status.value}: NOT 100%")
        )
        if not rank.is_perfect:
            print(_reasons(rank, verdict))
    if result.failure:
        print(f"{result.row.name}: {result.failure}")
    print(end="", flush=True)


def _reasons(rank: RankResult, verdict: Verdict) -> str:
    reasons = [verdict.message]
    if verdict.structure.first_mismatch:
        reasons.append(verdict.structure.first_mismatch.text)
    if verdict.values.first_divergence:
        reasons.append(verdict.values.first_divergence.text)
    if rank.lines_recorded != rank.lines_replayed:
        reasons += ["printed when recorded, and now:", *rank.lines_recorded, *rank.lines_replayed]
    return "\n".join("    " + line for reason in reasons if reason for line in reason.splitlines())


def print_summary(results: Iterable[RowResult]) -> None:
    """A line a program."""
    print(
        f"\n{'program':<24}{'of':>4}{'replayed':>10}{'calls':>9}{'structure':>11}{'training':>10}"
        f"{'values':>8}{'losses':>8}{'record':>9}{'replays':>9}"
    )
    for result in results:
        verdicts = [rank.verdict for rank in result.ranks if rank.verdict is not None]
        shares = (
            _percent((v.structure.matched, v.structure.total) for v in verdicts),
            _percent((v.structure.training_matched, v.structure.training_total) for v in verdicts),
            _percent((v.values.identical, v.values.compared) for v in verdicts),
            _percent((rank.lines_equal, len(rank.lines_recorded)) for rank in result.ranks),
        )
        print(
            f"{result.row.name:<24}{result.row.nproc:>4}{len(verdicts):>10}"
            f"{sum(v.structure.total for v in verdicts):>9}"
            f"{shares[0]:>11}{shares[1]:>10}{shares[2]:>8}{shares[3]:>8}"
            f"{result.record_s:>7.1f} s{result.replay_s:>7.1f} s"
            + ("" if result.is_perfect else "  NOT 100%")
        )


def _percent(parts: Iterable[tuple[int, int]]) -> str:
    """``100%`` for all of them only: never by rounding."""
    pairs = list(parts)
    good, total = sum(a for a, _ in pairs), sum(b for _, b in pairs)
    if not total:
        return "none"
    return "100%" if good == total else f"{min(99.99, 100 * good / total):.2f}%"


def chosen_rows(*, quick: bool, only: Sequence[str]) -> list[Row]:
    rows = [row for row in ROWS if not quick or row.nproc <= QUICK_NPROC]
    if only:
        rows = [row for row in rows if any(text in row.name for text in only)]
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help=f"rows of up to {QUICK_NPROC} ranks")
    parser.add_argument(
        "--only", action="append", default=[], metavar="TEXT", help="rows whose name has TEXT"
    )
    parser.add_argument("--ranks", metavar="R,R", help="replay these ranks only, where the job has them")
    parser.add_argument(
        "--keep", type=Path, metavar="DIR", help="keep traces and verdicts in this new directory"
    )
    arguments = parser.parse_args()
    wanted = [int(rank) for rank in arguments.ranks.split(",")] if arguments.ranks else None
    rows = chosen_rows(quick=arguments.quick, only=arguments.only)
    for row in rows:
        if not row.is_available:
            print(f"left out: {row.name} ({row.missing} is not here)")
    results = []
    print(HEADER)
    for index, row in enumerate(row for row in rows if row.is_available):
        ranks = row.ranks if row.ranks is not None else tuple(range(row.nproc))
        if wanted is not None:
            ranks = tuple(rank for rank in wanted if rank < row.nproc)
        with tempfile.TemporaryDirectory(prefix="ranklens-fidelity-") as temporary:
            directory = Path(temporary)
            if arguments.keep:
                directory = arguments.keep / f"{index:02}"
                directory.mkdir(parents=True)
            results.append(run(row, ranks, directory))
        print_row(results[-1])
    print_summary(results)
    if not arguments.only:
        print("\nnot run here:", *(f"  {name}: {reason}" for name, reason in NOT_ON_CPU.items()), sep="\n")
    perfect = bool(results) and all(result.is_perfect for result in results)
    ranks_done = sum(len(result.ranks) for result in results)
    print(f"\n{ranks_done} replays of {len(results)} programs: {'all 100%' if perfect else 'NOT all 100%'}")
    return 0 if perfect else 1


if __name__ == "__main__":
    sys.exit(main())
