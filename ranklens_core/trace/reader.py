"""Opening a trace: cheap at first, each rank read when asked for, nothing believed unchecked."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from functools import cached_property
from types import TracebackType
from typing import Self

import pyarrow as pa

from ranklens_core.errors import (
    TraceDamagedError,
    TraceError,
    TraceFormatError,
    TraceIncompleteError,
    TraceNotFoundError,
    TraceVersionError,
    UsageError,
)
from ranklens_core.schema import GroupRecord, RankRecord, RunRecord, Step
from ranklens_core.trace.files import TraceFiles, trace_files
from ranklens_core.trace.journal import RankJournal, read_journal
from ranklens_core.trace.layout import JOURNAL_FILE, RUN_FILE, rank_directory, rank_of_directory
from ranklens_core.trace.problem import Problem, ProblemKind, damaged
from ranklens_core.trace.ranktrace import RankTrace
from ranklens_core.trace.runfile import decode_run_file


def open_trace(path: str | os.PathLike[str]) -> Trace:
    """Open the trace at ``path``: a directory, or a URL if fsspec is installed.

    Raises:
        TraceNotFoundError: nothing is there.
        TraceFormatError: what is there is no trace.
        TraceVersionError: it needs a newer RankLens.
        TraceDamagedError: its ``run.json`` is damaged.
        UsageError: a URL, and fsspec or its protocol is not installed.
    """
    files = trace_files(path)
    names = files.names()
    if names is None:
        raise TraceNotFoundError(
            f"there is no trace at {files.path}. Record one: ranklens record --out {files.path} -- PROGRAM"
        )
    return _open(files, names)


def open_without_run_file(files: TraceFiles) -> Trace:
    """Open a trace whose ``run.json`` is damaged, by its ranks' journals; errors as ``open_trace``."""
    return _open(files, [name for name in files.names() or [] if name != RUN_FILE])


def _open(files: TraceFiles, names: list[str]) -> Trace:
    ranks = sorted(rank for name in names if (rank := rank_of_directory(name)) is not None)
    return Trace(files, _read_run(files, names, ranks), ranks)


def _read_run(files: TraceFiles, names: list[str], found: list[int]) -> RunRecord:
    """The run's record, from ``run.json`` or else from the journal of a rank."""
    data = files.data(RUN_FILE) if RUN_FILE in names else None
    if data is not None:
        try:
            return decode_run_file(bytes(data), f"{files.path}/{RUN_FILE}")
        except TraceDamagedError as error:
            if found:
                raise
            raise TraceFormatError(f"{files.path} is no trace: its {RUN_FILE} is not RankLens'.") from error
    if JOURNAL_FILE in names:
        raise TraceFormatError(f"{files.path} is one rank's part of a trace. Name the directory above it.")
    if not found:
        raise TraceFormatError(
            f"{files.path} is no trace: it has neither {RUN_FILE} nor {rank_directory(0)}. Name the "
            "directory that ranklens record wrote (--out)."
        )
    unusable: TraceError | None = None
    for rank in found:
        try:
            return _read_journal(files, rank).run
        except TraceIncompleteError:
            continue  # that rank died before its first line; the next one says the same
        except TraceVersionError:
            raise
        except TraceError as error:
            unusable = unusable or error
    if unusable is not None:
        raise unusable
    raise TraceFormatError(
        f"{files.path} holds no recording: its ranks died before they began. Record again."
    )


def _read_journal(files: TraceFiles, rank: int) -> RankJournal:
    name = f"{rank_directory(rank)}/{JOURNAL_FILE}"
    data = files.data(name)
    if data is None:
        raise TraceIncompleteError(
            f"{files.path}/{name} is missing: rank {rank} was not recorded. Record again."
        )
    journal = read_journal(data, f"{files.path}/{name}")
    if journal.record.rank != rank:
        raise damaged(f"{files.path}/{name}", f"it is the journal of rank {journal.record.rank}")
    return journal


class Trace:
    """A recorded run. Use it as a context manager, or ``close`` it."""

    def __init__(self, files: TraceFiles, run: RunRecord, found: list[int]) -> None:
        """``found`` are the ranks that have a directory."""
        self.path = files.path
        self.run = run
        self.world_size = run.world_size
        self.files = files
        self.found = [rank for rank in found if rank < run.world_size]
        self.strays = [rank for rank in found if rank >= run.world_size]
        self._journals: dict[int, RankJournal] = {}
        self._ranks: dict[int, RankTrace] = {}

    @property
    def ranks(self) -> Mapping[int, RankRecord]:
        """The ranks that were recorded, in order. A record is read when it is looked up."""
        return _Ranks(self)

    @cached_property
    def group_records(self) -> tuple[GroupRecord, ...]:
        """Every process group of the run once, in the order of the ranks that knew it."""
        groups: dict[str, GroupRecord] = {}
        for record in self.ranks.values():
            for group in record.groups:
                if group.key not in groups or not groups[group.key].role:
                    groups[group.key] = group
        return tuple(groups.values())

    @cached_property
    def groups(self) -> Mapping[str, tuple[GroupRecord, ...]]:
        """Process groups by role (``"tp"``: all of that role) and by key (that one alone).

        Looking up another name is a ``KeyError`` that lists those there are.
        """
        found = _Groups()
        for group in self.group_records:
            for name in (group.key, *filter(None, group.role.split("+"))):
                found[name] = (*found.get(name, ()), group)
        return found

    @cached_property
    def steps(self) -> Mapping[int, tuple[Step, ...]]:
        """The training steps of every recorded rank."""
        return {rank: record.steps for rank, record in self.ranks.items()}

    @property
    def missing(self) -> tuple[Problem, ...]:
        """What was not recorded: ranks that are not there, or that ended early.

        Raises:
            TraceDamagedError, TraceVersionError: a journal cannot be read (``verify`` lists all).
        """
        problems = []
        for rank in range(self.world_size):
            problem = self.shortfall(rank)
            if problem is not None:
                problems.append(problem)
        return tuple(problems)

    def calls(self, rank: int) -> pa.Table:
        """All calls of ``rank``, one a row, in entry order; errors as ``rank``.

        Columns of the ``Signature``, the ``CallRow`` and the ``CompletionRow`` (null where the
        call did not complete): a ``pyarrow.Table``, whose ``to_pandas()`` needs pandas installed.
        """
        return self.rank(rank).joined_calls

    def rank(self, rank: int) -> RankTrace:
        """The recording of ``rank``.

        Raises:
            UsageError: no rank of this world.
            TraceIncompleteError: a rank of this world, but it was not recorded.
            TraceDamagedError, TraceVersionError: its journal cannot be used.
        """
        if not 0 <= rank < self.world_size:
            raise UsageError(
                f"rank {rank} is not in {self.path}: its world has {self.world_size} ranks, "
                f"0 to {self.world_size - 1}. Choose one of them with --rank."
            )
        if rank not in self._ranks:
            self._ranks[rank] = RankTrace(self.files, self.journal(rank))
        return self._ranks[rank]

    def journal(self, rank: int) -> RankJournal:
        """The journal of ``rank``, read once; errors as ``rank``."""
        if rank not in self._journals:
            journal = _read_journal(self.files, rank)
            if (journal.run.run_id, journal.run.world_size) != (self.run.run_id, self.run.world_size):
                raise TraceDamagedError(
                    f"{self.path}/{rank_directory(rank)} is of another run ({journal.run.run_id}, "
                    f"{journal.run.world_size} ranks) than this trace ({self.run.run_id}, {self.world_size} "
                    "ranks). Copy the ranks of one run into a directory of their own."
                )
            if journal.meeting:
                self._check_meeting(rank, journal.meeting)
            self._journals[rank] = journal
        return self._journals[rank]

    def _check_meeting(self, rank: int, meeting: str) -> None:
        """Two jobs of one launcher have the same run id, but their ranks never met."""
        first = self._first_met
        if first is not None and first[1] != meeting:
            raise TraceDamagedError(
                f"{self.path}/{rank_directory(rank)} and {rank_directory(first[0])} are of two runs: these "
                f"ranks never met ({meeting}, {first[1]}). Copy the ranks of one run into a directory of "
                "their own, or record again into a new one."
            )

    @cached_property
    def _first_met(self) -> tuple[int, str] | None:
        """The first rank that met the others, and the id they agreed on."""
        for rank in self.found:
            try:
                meeting = _read_journal(self.files, rank).meeting
            except TraceError:
                continue  # told where that rank is asked for
            if meeting:
                return rank, meeting
        return None

    def close(self) -> None:
        """Let go of all files."""
        for rank in self._ranks.values():
            rank.close()
        self._ranks.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def shortfall(self, rank: int) -> Problem | None:
        """What is missing of ``rank``'s recording; None if it is complete. Errors as ``missing``."""
        file = f"{rank_directory(rank)}/{JOURNAL_FILE}"
        try:
            journal = self.journal(rank)
        except TraceIncompleteError:
            text = f"rank {rank} was not recorded"
            return Problem(rank=rank, file=file, kind=ProblemKind.MISSING_RANK, text=text)
        if journal.record.complete:
            return None
        reason = journal.record.failure or "the process died without ending its recording"
        text = f"rank {rank} ended early: {reason}; {self._last_place(rank)}"
        return Problem(rank=rank, file=file, kind=ProblemKind.INCOMPLETE_RANK, text=text)

    def _last_place(self, rank: int) -> str:
        """Up to where an incomplete rank was recorded."""
        journal = self.journal(rank)
        seconds = (journal.time_ns - journal.record.monotonic_ns) / 1e9
        try:
            calls = self.rank(rank).calls
        except TraceDamagedError:
            return f"its calls are damaged; last flush after {seconds:.3f} s"
        if calls.num_rows == 0:
            return f"no call was recorded; last flush after {seconds:.3f} s"
        entry, step = calls["entry"][-1].as_py(), calls["step"][-1].as_py()
        return f"last entry {entry} in step {step}; last flush after {seconds:.3f} s"


class _Groups(dict[str, tuple[GroupRecord, ...]]):
    """Groups by name; a missing name says which there are."""

    def __missing__(self, name: str) -> tuple[GroupRecord, ...]:
        raise KeyError(
            f"there is no group or role {name!r} in this trace: it has {', '.join(self) or 'none'}"
        )


class _Ranks(Mapping[int, RankRecord]):
    """Records of the recorded ranks, each read when it is looked up."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace

    def __getitem__(self, rank: int) -> RankRecord:
        if rank not in self._trace.found:
            raise KeyError(rank)
        return self._trace.journal(rank).record

    def __iter__(self) -> Iterator[int]:
        return filter(self._has_begun, self._trace.found)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def _has_begun(self, rank: int) -> bool:
        """Whether the rank wrote its first line; a journal that cannot be read counts."""
        try:
            self._trace.journal(rank)
        except TraceIncompleteError:
            return False
        except (TraceDamagedError, TraceVersionError):
            return True
        return True
