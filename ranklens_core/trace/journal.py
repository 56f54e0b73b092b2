"""A rank's journal: what happened to its recording, line by line.

A line is ``<checksum> <JSON>\\n``. The checksum is xxh3-64 of the JSON, seeded with the checksum of
the line before, so that a lost or swapped line shows as well as a changed one. A last line without
its line end was being written when the process died, and is ignored.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import msgspec
import xxhash

from ranklens_core.errors import TraceDamagedError, TraceIncompleteError
from ranklens_core.schema import (
    NO_STEP,
    TRACE_VERSION,
    EnvironmentItem,
    GroupRecord,
    Printed,
    RankRecord,
    RunRecord,
    Step,
)
from ranklens_core.trace.files import AppendFile, write_all
from ranklens_core.trace.lines import (
    LINE_TYPES,
    AliveLine,
    EndLine,
    EnvironmentLine,
    FailureLine,
    FlushLine,
    GroupLine,
    HeaderLine,
    Line,
    MeetingLine,
    PrintedLine,
    RoleLine,
    StepLine,
)
from ranklens_core.trace.plausible import group_problem, step_problem
from ranklens_core.trace.problem import damaged
from ranklens_core.trace.runfile import DECODE_ERRORS, decode_run
from ranklens_core.trace.streams import ByteRange, Stream

_KINDS = frozenset(str(line_type.__struct_config__.tag) for line_type in LINE_TYPES)

_LINE = re.compile(rb"([0-9a-f]{16}) (.*)", re.DOTALL)
_decoder = msgspec.json.Decoder(Line)


class _Kind(msgspec.Struct, frozen=True):
    kind: str


class _HeaderRun(msgspec.Struct, frozen=True):
    run: msgspec.Raw


class JournalWriter:
    """Appends lines to a journal."""

    def __init__(self, file: AppendFile) -> None:
        self._file = file
        self._checksum = 0
        self._size_bytes = 0

    def append(self, line: Line) -> None:
        """Write ``line``. If that fails, the file is cut back to its whole lines.

        Raises:
            OSError: the file system refused.
        """
        body = msgspec.json.encode(line)
        checksum = xxhash.xxh3_64_intdigest(body, self._checksum)
        text = b"%016x %b\n" % (checksum, body)
        try:
            write_all(self._file, text)
        except OSError:
            self._file.truncate(self._size_bytes)
            self._file.seek(self._size_bytes)
            raise
        self._checksum = checksum
        self._size_bytes += len(text)

    def close(self) -> None:
        self._file.close()


class Damage(msgspec.Struct, frozen=True):
    """A line that is not as it was written."""

    text: str


def parse_journal(data: memoryview, path: str) -> Iterator[Line | Damage]:
    """The whole lines of a journal, in order; what cannot be read as one is a ``Damage``.

    Kinds of line that this RankLens does not know are skipped if a newer RankLens wrote the
    journal.

    Raises:
        TraceVersionError: the journal needs a newer RankLens.
    """
    *lines, _torn = bytes(data).split(b"\n")
    checksum = 0
    is_newer = False
    for number, text in enumerate(lines, 1):
        match = _LINE.fullmatch(text)
        if match is None:
            yield Damage(f"line {number} is no journal line")
            continue
        body = match[2]
        expected, checksum = xxhash.xxh3_64_intdigest(body, checksum), int(match[1], 16)
        if checksum != expected:
            yield Damage(f"line {number} differs from its checksum, or the line before it is missing")
            continue
        try:
            if number == 1:
                run = decode_run(bytes(msgspec.json.decode(body, type=_HeaderRun).run), path)
                is_newer = run.format > TRACE_VERSION
            elif is_newer and msgspec.json.decode(body, type=_Kind).kind not in _KINDS:
                continue
            yield _decoder.decode(body)
        except (*DECODE_ERRORS, TraceDamagedError) as error:
            yield Damage(f"line {number}: {error}")


class RankJournal(msgspec.Struct, frozen=True, kw_only=True):
    """A whole journal: the run, the rank's record, and where each stream's checked bytes are.

    ``meeting`` is the id that the job's ranks agreed on, empty if they did not meet. ``time_ns`` is the time
    of the last line that has one (monotonic clock of the rank's host). ``alive`` is the last sign of life of
    a rank that recorded nothing any more, None if it recorded to its end.
    """

    run: RunRecord
    record: RankRecord
    meeting: str
    ranges: dict[Stream, tuple[ByteRange, ...]]
    time_ns: int
    alive: AliveLine | None


def read_journal(data: memoryview, path: str) -> RankJournal:
    """Everything a journal says. ``path`` is the file, for messages.

    Raises:
        TraceDamagedError: a line is not as it was written.
        TraceIncompleteError: the rank died before its first line was written.
        TraceVersionError: a newer RankLens is needed.
    """
    lines = []
    for line in parse_journal(data, path):
        if isinstance(line, Damage):
            raise TraceDamagedError(
                f"{path} is damaged: {line.text}. Copy the trace again, or record it again."
            )
        lines.append(line)
    return summarise(lines, path)


def summarise(lines: Sequence[Line], path: str) -> RankJournal:
    """Fold the lines of a journal into one record.

    Raises:
        TraceDamagedError: the first line, and only that, must be a header.
        TraceIncompleteError: there are no lines.
    """
    if not lines:
        raise TraceIncompleteError(
            f"{path} is empty: the rank died before it recorded anything. Record again."
        )
    start, *rest = lines
    if not isinstance(start, HeaderLine) or any(isinstance(line, HeaderLine) for line in rest):
        raise damaged(path, "its header is not its first line")

    window = start.header.value_steps
    if window is not None and (window[0] < 0 or (window[1] is not None and window[1] <= window[0])):
        raise damaged(path, f"it has values of the steps {window[0]}:{window[1]}")
    groups: dict[str, GroupRecord] = {}
    roles: dict[str, str] = {}
    steps: list[Step] = []
    environment: list[EnvironmentItem] = []
    printed: list[Printed] = []
    ranges: dict[Stream, list[ByteRange]] = {stream: [] for stream in Stream}
    meeting, failure, end, time_ns = "", "", None, start.header.monotonic_ns
    alive = None
    for line in rest:
        match line:
            case MeetingLine():
                meeting = line.id
            case GroupLine(group=group):
                problem = group_problem(group, start.header.rank, start.run.world_size)
                if problem:
                    raise damaged(path, problem)
                groups[group.key] = group
            case RoleLine(key=key, role=role):
                roles[key] = role
            case StepLine(step=step):
                problem = step_problem(step, steps[-1].index if steps else NO_STEP)
                if problem:
                    raise damaged(path, problem)
                steps.append(step)
            case EnvironmentLine(item=fact):
                environment.append(fact)
            case PrintedLine(item=metric):
                printed.append(metric)
            case AliveLine():
                alive = line
            case FlushLine():
                alive = None
                for stream, part in line.ranges.items():
                    ranges[stream].append(part)
            case FailureLine():
                failure = line.text
            case EndLine():
                end = line
        if isinstance(line, (FlushLine, AliveLine, FailureLine, EndLine)):
            time_ns = line.time_ns

    record = RankRecord(
        **msgspec.structs.asdict(start.header),
        complete=end is not None and not failure,
        exit_status=None if end is None else end.exit_status,
        failure=failure,
        error="" if end is None else end.error,
        error_site="" if end is None else end.error_site,
        groups=tuple(
            msgspec.structs.replace(group, role=roles.get(group.key, group.role)) for group in groups.values()
        ),
        steps=tuple(steps),
        environment=tuple(environment),
        printed=tuple(printed),
    )
    return RankJournal(
        run=start.run,
        record=record,
        meeting=meeting,
        ranges={stream: tuple(parts) for stream, parts in ranges.items()},
        time_ns=time_ns,
        alive=None if end is not None else alive,
    )
