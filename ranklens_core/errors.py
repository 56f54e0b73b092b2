"""Every error RankLens raises, in one tree.

    RankLensError
    ├── UsageError                 exit 2   the command, a flag or a setting is wrong
    ├── StructureMismatchError     exit 3   the program's calls are not the recorded ones
    ├── ValuesDivergedError        exit 4   an input differs from the recorded one
    ├── TraceError                 exit 5   the trace cannot be used for this
    │   ├── TraceNotFoundError              there is nothing at that path
    │   ├── TraceFormatError                what is there is no RankLens trace
    │   ├── TraceVersionError               written by a newer RankLens
    │   ├── TraceDamagedError               bytes differ from their checksum, or are missing
    │   ├── TraceIncompleteError            the recording ended before this point
    │   └── ValuesMissingError              this rank's values were not recorded
    ├── UnsupportedError           exit 6   communication RankLens cannot stand in for
    │   └── UnknownOperatorError            a c10d operator that is not in the table
    └── RecorderError              (logged) recording failed; the training goes on

Each message says what happened, where, and what to do next.
"""

from __future__ import annotations

from typing import ClassVar


class RankLensError(Exception):
    """Root of the tree. ``exit_status`` is what the command line ends with."""

    exit_status: ClassVar[int] = 2


class UsageError(RankLensError):
    """The command, a flag, a setting or the environment is wrong."""


class StructureMismatchError(RankLensError):
    """The program issued a call that the trace does not have at that place."""

    exit_status: ClassVar[int] = 3


class ValuesDivergedError(RankLensError):
    """An input of a call has other bits than the recorded one."""

    exit_status: ClassVar[int] = 4


class TraceError(RankLensError):
    """The trace cannot be used for what was asked."""

    exit_status: ClassVar[int] = 5


class TraceNotFoundError(TraceError):
    """There is no file or directory at that path."""


class TraceFormatError(TraceError):
    """The directory is not a RankLens trace."""


class TraceVersionError(TraceError):
    """The trace needs a newer RankLens."""


class TraceDamagedError(TraceError):
    """Bytes of the trace are missing or differ from their checksum."""


class TraceIncompleteError(TraceError):
    """The recording ended before the point that was asked for."""


class ValuesMissingError(TraceError):
    """The trace holds no values for this rank."""


class UnsupportedError(RankLensError):
    """The program communicates in a way that RankLens cannot stand in for."""

    exit_status: ClassVar[int] = 6


class UnknownOperatorError(UnsupportedError):
    """torch has a c10d operator that RankLens' operator table lacks."""


class RecorderError(RankLensError):
    """Recording failed. Logged and noted in the trace; never raised into the training."""
