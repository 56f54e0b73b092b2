"""The kinds of line a journal has: plain typed data, told apart by ``kind``."""

from __future__ import annotations

import msgspec

from ranklens_core.schema import EnvironmentItem, GroupRecord, Printed, RunRecord, Step
from ranklens_core.trace.streams import ByteRange, Stream


class RankHeader(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a rank when its recording starts; fields as in ``RankRecord``."""

    rank: int
    host: str
    pid: int
    local_rank: int
    has_values: bool
    value_steps: tuple[int, int | None] | None
    window_only: bool = False
    monotonic_ns: int
    realtime_ns: int


class HeaderLine(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="header"):
    """The first line: repeats the run, so that a rank's directory explains itself."""

    run: RunRecord
    header: RankHeader


class MeetingLine(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="meeting"):
    """The ranks of the job agreed on ``id``: ranks with another one are of another run."""

    id: str


class GroupLine(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="group"):
    """A group was made."""

    group: GroupRecord


class RoleLine(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="role"):
    """The role of the group ``key`` was learned; the last line about a group counts."""

    key: str
    role: str


class StepLine(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="step"):
    """A training step ended."""

    step: Step


class EnvironmentLine(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="environment"):
    """A fact about where the program runs."""

    item: EnvironmentItem


class PrintedLine(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="printed"):
    """The program printed a metric."""

    item: Printed


class FlushLine(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="flush"):
    """Rows are on disk: these byte ranges, by stream. Rows count only once their flush is here."""

    time_ns: int
    ranges: dict[Stream, ByteRange]


class AliveLine(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="alive"):
    """The rank lives, but nothing was recorded for a while: what it waits for and where it is.

    ``waiting`` are entries of the calls that threads of the program are inside of, or wait for.
    ``place`` is the main thread's innermost frame in the program's own files, ``file:line function``.
    """

    time_ns: int
    waiting: tuple[int, ...]
    place: str


class FailureLine(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="failure"):
    """Recording stopped early, while the program went on."""

    time_ns: int
    text: str


class EndLine(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="end"):
    """The rank closed its trace: all it did is recorded.

    ``error`` is the exception that the program ended with (``Type: message``), ``error_site`` its
    innermost frame in the program's own files; both ``""`` without one.
    """

    time_ns: int
    exit_status: int | None
    error: str = ""
    error_site: str = ""


Line = (
    HeaderLine
    | MeetingLine
    | GroupLine
    | RoleLine
    | StepLine
    | EnvironmentLine
    | PrintedLine
    | FlushLine
    | AliveLine
    | FailureLine
    | EndLine
)
LINE_TYPES: tuple[type[msgspec.Struct], ...] = (
    HeaderLine,
    MeetingLine,
    GroupLine,
    RoleLine,
    StepLine,
    EnvironmentLine,
    PrintedLine,
    FlushLine,
    AliveLine,
    FailureLine,
    EndLine,
)
