"""What can be wrong with a trace, as rows."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class ProblemKind(StrEnum):
    """How a trace can fall short."""

    DAMAGED = "damaged"
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
