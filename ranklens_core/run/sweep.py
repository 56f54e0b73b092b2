"""What the jobs of a sweep found, read from their directories: one row for each rank and what-if."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import msgspec

from ranklens_core.errors import RankLensError
from ranklens_core.run.job import OUTCOME, VERDICT, Outcome
from ranklens_core.run.recorded_time import recorded_exposed_ns
from ranklens_core.verdict import Status, StepResult, Verdict

OWN_OVERRIDES = ("rank", "task", "recorded")
"""What has a column of its own, or is none of the user's."""


@dataclass(frozen=True)
class Figure:
    """A number, and in one word where it comes from (``SOURCES`` of ``table.py``)."""

    value: float
    source: str


@dataclass(frozen=True)
class Result:
    """One job: how it ended, and its verdict if it got that far."""

    outcome: Outcome
    verdict: Verdict | None

    @property
    def word(self) -> str:
        """The outcome in a word."""
        if self.verdict is None:
            return f"no verdict, exit status {self.outcome.status}"
        status, made_up = self.verdict.status, self.verdict.provenance.result.get("synthesised", 0)
        text = f"exit status {self.outcome.status}" if status is Status.PROGRAM_FAILED else str(status.value)
        return f"{text}, {made_up} results made up" if made_up else text


@dataclass
class Row:
    """A rank under one set of overrides; jobs that differ in the task alone are in one row."""

    rank: int
    overrides: tuple[str, ...]
    results: list[Result] = field(default_factory=list)
    recorded_exposed_ns: int | None = None

    @property
    def verdicts(self) -> list[Verdict]:
        return [result.verdict for result in self.results if result.verdict is not None]

    @property
    def roles(self) -> tuple[str, ...]:
        return next((verdict.roles for verdict in self.verdicts if verdict.roles), ())

    @property
    def step(self) -> Figure | None:
        """A step's time in the replay, ms: of the task that kept time, else as fast as results were had."""
        for verdict in self._kept_time():
            assert verdict.timing.step is not None
            return Figure(verdict.timing.step.replayed_ns / 1e6, _time_source(verdict))
        for verdict in self.verdicts:
            if verdict.steps:
                return Figure(_median_ms([step.wall_ns for step in _steady(verdict.steps)]), "fast")
        return None

    @property
    def recorded_step(self) -> Figure | None:
        """The same steps' time when recorded, ms."""
        for verdict in [*self._kept_time(), *self.verdicts]:
            times = [s.recorded_ns for s in _steady(verdict.steps) if s.recorded_ns is not None]
            if times:
                return Figure(
                    _median_ms(times), "virtual" if verdict.provenance.clock == "virtual" else "recorded"
                )
        return None

    @property
    def error_pct(self) -> float | None:
        """How far the steps are from the recorded ones on average, percent; only where time was kept."""
        return next((verdict.timing.mean_abs_error_pct for verdict in self._kept_time()), None)

    @property
    def exposed(self) -> Figure | None:
        """Waiting and transfer that held the program in a step, ms: of the replay, else of the recording."""
        for verdict in self._kept_time():
            wait, transfer = verdict.timing.wait, verdict.timing.transfer
            if wait is not None and transfer is not None:
                return Figure((wait.replayed_ns + transfer.replayed_ns) / 1e6, _time_source(verdict))
        if self.recorded_exposed_ns is not None:
            return Figure(self.recorded_exposed_ns / 1e6, "recorded")
        return None

    @property
    def peak(self) -> Figure | None:
        """Peak of memory, MiB: of a step where the task took it, else of the whole replay process."""
        for verdict in self.verdicts:
            if verdict.memory is not None and verdict.memory.steps:
                peak = max(step.peak_bytes for step in verdict.memory.steps)
                on_gpu = verdict.memory.counter.startswith("allocated")
                return Figure(peak / 2**20, "allocated" if on_gpu else "resident")
        peaks = [result.outcome.peak_rss_bytes for result in self.results]
        return Figure(max(peaks) / 2**20, "process") if any(peaks) else None

    @property
    def structure(self) -> tuple[int, int] | None:
        """Calls as recorded, of so many: of the task that matched fewest."""
        found = [(verdict.structure.matched, verdict.structure.total) for verdict in self.verdicts]
        return min(found, key=lambda pair: pair[0] / (pair[1] or 1)) if found else None

    @property
    def values(self) -> tuple[int, int] | None:
        """Inputs as recorded, of those compared; None where none was."""
        found = [(v.values.identical, v.values.compared) for v in self.verdicts if v.values.compared]
        return min(found, key=lambda pair: pair[0] / pair[1]) if found else None

    @property
    def verdict(self) -> str:
        """Each task's outcome in a word, or one word for all."""
        words = [result.word for result in self.results]
        if len(set(words)) == 1:
            return words[0]
        return "; ".join(
            f"{result.outcome.task or 'job'} {word}" for result, word in zip(self.results, words, strict=True)
        )

    def _kept_time(self) -> list[Verdict]:
        return [verdict for verdict in self.verdicts if verdict.timing.step is not None]


@dataclass(frozen=True)
class Sweep:
    """All jobs that left something behind; ``missing`` is how many did not."""

    results: tuple[Result, ...]
    missing: int = 0

    @classmethod
    def read(cls, directories: Sequence[Path], missing: int = 0) -> Sweep:
        """From the jobs' directories, in order."""
        return cls(tuple(_read(directory) for directory in directories), missing)

    @classmethod
    def read_all(cls, directory: Path, expected: int) -> Sweep:
        """From a sweep's directory; ``expected`` is the number of jobs if it was known before, else 0."""
        found = sorted((file.parent for file in directory.glob(f"*/{OUTCOME}")), key=_natural)
        return cls.read(found, max(0, expected - len(found)))

    @property
    def worst_status(self) -> int:
        """The greatest exit status of a job; at least 1 where one left none behind."""
        statuses = [result.outcome.status for result in self.results]
        return max([*statuses, 1] if self.missing or not statuses else statuses)

    def rows(self) -> list[Row]:
        """By rank and what differs besides; in the jobs' order."""
        varying = _varying([result.outcome.overrides for result in self.results])
        rows: dict[tuple[int, tuple[str, ...]], Row] = {}
        for result in self.results:
            kept = tuple(text for text in result.outcome.overrides if _key(text) in varying)
            row = rows.setdefault((result.outcome.rank, kept), Row(result.outcome.rank, kept))
            row.results.append(result)
        _add_recorded(list(rows.values()))
        return list(rows.values())


def _read(directory: Path) -> Result:
    outcome = msgspec.json.decode((directory / OUTCOME).read_bytes(), type=Outcome)
    file = directory / VERDICT
    data = file.read_bytes() if file.is_file() else b""
    return Result(outcome, msgspec.json.decode(data, type=Verdict) if data else None)


def _add_recorded(rows: Sequence[Row]) -> None:
    """Where no task kept time, say how long the rank was held when it was recorded."""
    by_trace: dict[str, list[Row]] = {}
    for row in rows:
        if row.verdicts and row.exposed is None:
            by_trace.setdefault(row.results[0].outcome.trace, []).append(row)
    for trace, its_rows in by_trace.items():
        try:
            held: Mapping[int, int] = recorded_exposed_ns(Path(trace), {row.rank for row in its_rows})
        except RankLensError:
            continue  # a cell stays empty: the replays themselves have said what is wrong with the trace
        for row in its_rows:
            row.recorded_exposed_ns = held.get(row.rank)


def _varying(overrides: Sequence[Sequence[str]]) -> set[str]:
    """Keys whose overrides are not the same in all jobs, but for those with a column of their own."""
    seen: dict[str, set[str]] = {}
    for each in overrides:
        for text in each:
            seen.setdefault(_key(text), set()).add(text)
    return {key for key, texts in seen.items() if len(texts) > 1 and key not in OWN_OVERRIDES}


def _key(override: str) -> str:
    return override.partition("=")[0].lstrip("+")


def _natural(directory: Path) -> tuple[int, str]:
    return (int(directory.name) if directory.name.isdigit() else 1 << 31, directory.name)


def _time_source(verdict: Verdict) -> str:
    counts = verdict.provenance.time
    return "estimated" if counts.get("estimated") else "kept"


def _steady(steps: Sequence[StepResult]) -> Sequence[StepResult]:
    """Those after the first, which warms up (unless it is the only one)."""
    return steps[1:] or steps


def _median_ms(times_ns: Sequence[int]) -> float:
    return median(times_ns) / 1e6
