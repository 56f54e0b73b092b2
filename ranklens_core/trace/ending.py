"""``ending.json``: how a job that RankLens started itself ended, as its launcher saw it.

A killed rank cannot say so. Jobs of other launchers have no such file.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from ranklens_core.trace.files import TraceFiles
from ranklens_core.trace.layout import ENDING_FILE
from ranklens_core.trace.problem import damaged
from ranklens_core.trace.runfile import DECODE_ERRORS


class JobEnding(msgspec.Struct, frozen=True, kw_only=True):
    """``first_failure`` is the rank that failed first, None if none did or the job was interrupted, with
    its ``status`` and the ``signal`` that killed it (0 for none). ``interrupted_by`` is the signal that ended
    the whole job from outside, 0 for none."""

    first_failure: int | None
    status: int
    signal: int
    interrupted_by: int


def write_ending(directory: Path, ending: JobEnding) -> None:
    """Write ``directory/ending.json``; OSError if it cannot be."""
    (directory / ENDING_FILE).write_bytes(msgspec.json.encode(ending) + b"\n")


def read_ending(files: TraceFiles) -> JobEnding | None:
    """How the job ended, None where no launcher said so.

    Raises:
        TraceDamagedError: the file is not what ``write_ending`` writes.
    """
    data = files.data(ENDING_FILE)
    if data is None:
        return None
    try:
        return msgspec.json.decode(data, type=JobEnding)
    except DECODE_ERRORS as error:
        raise damaged(f"{files.path}/{ENDING_FILE}", str(error)) from error
