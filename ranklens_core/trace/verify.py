"""Checking a whole trace: every problem, not only the first."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from itertools import chain

import msgspec

from ranklens_core.errors import (
    TraceDamagedError,
    TraceError,
    TraceFormatError,
    TraceNotFoundError,
    TraceVersionError,
)
from ranklens_core.trace.files import trace_files
from ranklens_core.trace.journal import Damage, parse_journal
from ranklens_core.trace.layout import JOURNAL_FILE, RUN_FILE, rank_directory
from ranklens_core.trace.problem import Problem, ProblemKind
from ranklens_core.trace.ranktrace import RankTrace
from ranklens_core.trace.reader import Trace, open_trace, open_without_run_file
from ranklens_core.trace.streams import Stream, range_problems

CALL_STREAMS = {Stream.SIGNATURES, Stream.CALLS, Stream.COMPLETIONS}


class VerifyReport(msgspec.Struct, frozen=True, kw_only=True):
    """What was checked, and everything that is wrong.

    ``calls`` and ``values`` count what could be checked, over all ranks; ``value_bytes`` is the
    size of those values.
    """

    path: str
    format: int
    world_size: int
    calls: int
    values: int
    value_bytes: int
    problems: tuple[Problem, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing at all is wrong."""
        return not self.problems


def verify(path: str | os.PathLike[str]) -> VerifyReport:
    """Read every byte of the trace at ``path`` and compare it with its checksum.

    Raises:
        TraceNotFoundError, TraceFormatError, UsageError: as ``open_trace``; there is nothing to
            check.
        TraceVersionError: a newer RankLens wrote the run.
    """
    problems = []
    try:
        trace = open_trace(path)
    except (TraceNotFoundError, TraceFormatError, TraceVersionError):
        raise
    except TraceError as error:
        problems.append(Problem(rank=None, file=RUN_FILE, kind=_kind(error), text=str(error)))
        try:
            trace = open_without_run_file(trace_files(path))
        except TraceError:
            raise error from None
    with trace:
        check = _Check(trace)
        for rank in range(trace.world_size):
            problems += check.rank(rank)
        problems += check.strays()
        return VerifyReport(
            path=trace.path,
            format=trace.run.format,
            world_size=trace.world_size,
            calls=check.calls,
            values=check.values,
            value_bytes=check.value_bytes,
            problems=tuple(problems),
        )


class _Check:
    """Checks rank by rank, and counts what was good."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self.calls = 0
        self.values = 0
        self.value_bytes = 0

    def strays(self) -> Iterator[Problem]:
        """Directories of ranks that the world does not have."""
        for rank in self._trace.strays:
            text = f"rank {rank} is outside the world of {self._trace.world_size} ranks"
            yield _problem(rank, "", ProblemKind.DAMAGED, text)

    def rank(self, rank: int) -> Iterator[Problem]:
        """Everything wrong with one rank. What a damaged journal describes cannot be checked."""
        damages = list(self._journal(rank))
        yield from damages
        if damages:
            return
        try:
            shortfall = self._trace.shortfall(rank)
        except TraceError as error:
            yield _problem(rank, JOURNAL_FILE, _kind(error), str(error))
            return
        if shortfall is not None:
            yield shortfall
        if shortfall is None or shortfall.kind is not ProblemKind.MISSING_RANK:
            recording = self._trace.rank(rank)
            yield from self._streams(recording)
            recording.close()

    def _journal(self, rank: int) -> Iterator[Problem]:
        path = f"{rank_directory(rank)}/{JOURNAL_FILE}"
        try:
            data = self._trace.files.data(path)
            for line in parse_journal(data or memoryview(b""), path):
                if isinstance(line, Damage):
                    yield _problem(rank, JOURNAL_FILE, ProblemKind.DAMAGED, line.text)
        except TraceError as error:
            yield _problem(rank, JOURNAL_FILE, _kind(error), str(error))

    def _streams(self, recording: RankTrace) -> Iterator[Problem]:
        """Damaged ranges of bytes; whether the rows of what is whole make sense; the values."""
        rank, broken = recording.record.rank, set()
        for stream in Stream:
            for problem in self._bytes(recording, stream):
                broken.add(stream)
                yield problem
        checks: tuple[tuple[set[Stream], Callable[[], object]], ...] = (
            (CALL_STREAMS, lambda: self._count_calls(recording)),
            (CALL_STREAMS | {Stream.WAITS}, lambda: recording.waits),
            ({Stream.VALUES}, lambda: recording.values),
        )
        for needed, check in checks:
            if needed & broken:
                continue
            try:
                check()
            except TraceError as error:
                broken |= needed
                yield _problem(rank, "", _kind(error), str(error))
        if Stream.VALUES not in broken:
            yield from self._payload(recording)
            if not CALL_STREAMS & broken:
                yield from self._missing_values(recording)

    def _bytes(self, recording: RankTrace, stream: Stream) -> Iterator[Problem]:
        rank = recording.record.rank
        try:
            data = recording.data(stream.file)
        except TraceError as error:
            yield _problem(rank, stream.file, _kind(error), str(error))
            return
        for text in range_problems(
            memoryview(b"") if data is None else data, recording.journal.ranges[stream]
        ):
            yield _problem(rank, stream.file, ProblemKind.DAMAGED, text)

    def _count_calls(self, recording: RankTrace) -> None:
        for _ in recording.call_records():
            self.calls += 1

    def _payload(self, recording: RankTrace) -> Iterator[Problem]:
        """Values that differ from their address, or are not there."""
        rank, values = recording.record.rank, recording.values
        seen = set()
        for address in values.addresses():
            try:
                self.value_bytes += len(values.get(address))
                self.values += 1
            except TraceError as error:
                if str(error) not in seen:
                    yield _problem(rank, "", _kind(error), str(error))
                seen.add(str(error))

    def _missing_values(self, recording: RankTrace) -> Iterator[Problem]:
        """Values that calls refer to, but nobody kept."""
        rank, values = recording.record.rank, recording.values
        if recording.record.has_values:
            needed = chain.from_iterable(recording.completions["out_addresses"].to_pylist())
            absent = {address for address in needed if address not in values}
            if absent:
                text = f"{len(absent)} values that calls refer to were not kept, {min(absent).hex()} for one"
                yield _problem(rank, Stream.VALUES.file, ProblemKind.MISSING_VALUES, text)


def _kind(error: TraceError) -> ProblemKind:
    if isinstance(error, TraceVersionError):
        return ProblemKind.VERSION
    return ProblemKind.DAMAGED if isinstance(error, TraceDamagedError) else ProblemKind.UNREADABLE


def _problem(rank: int, file: str, kind: ProblemKind, text: str) -> Problem:
    return Problem(rank=rank, file=f"{rank_directory(rank)}/{file}".rstrip("/"), kind=kind, text=text)
