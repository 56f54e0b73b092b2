"""What can be wrong with a trace: as rows of a report, and as the error of one file."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from ranklens_core.errors import TraceDamagedError


class ProblemKind(StrEnum):
    """How a trace can fall short."""

    DAMAGED = "damaged"
    UNREADABLE = "unreadable"
    VERSION = "version"
    MISSING_RANK = "missing-rank"
    INCOMPLETE_RANK = "incomplete-rank"
    MISSING_VALUES = "missing-values"


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that is wrong. ``rank`` is None for the whole run; ``file`` is relative to the trace."""

    rank: int | None
    file: str
    kind: ProblemKind
    text: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.file}: {self.text}" if self.file else f"{self.kind}: {self.text}"


def damaged(path: str, text: str) -> TraceDamagedError:
    """The error for a file whose bytes are not those that were written; ``text`` says how."""
    return TraceDamagedError(f"{path} is damaged: {text}. Copy the trace again, or record it again.")
