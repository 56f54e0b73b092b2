"""``run.json``: the run's record with its checksum, and the version gate.

{"checksum": "<xxh3-64 of the bytes of run, hex>", "run": {...RunRecord...}}
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import xxhash

from ranklens_core.errors import TraceVersionError
from ranklens_core.schema import TRACE_VERSION, RunRecord
from ranklens_core.trace.layout import MAX_WORLD_SIZE, RUN_FILE, RUN_FILE_PART
from ranklens_core.trace.problem import damaged

DECODE_ERRORS = (msgspec.MsgspecError, UnicodeError, RecursionError)
"""What msgspec raises for bytes that are no JSON, or JSON of another shape."""


class _Envelope(msgspec.Struct, frozen=True):
    checksum: str
    run: msgspec.Raw


class _Version(msgspec.Struct, frozen=True):
    format: int
    oldest_reader: int


def write_run(directory: Path, run: RunRecord) -> None:
    """Write ``directory/run.json``, replacing one that is there in a single move.

    Raises:
        OSError: the directory is missing, full or not writable.
    """
    body = msgspec.json.encode(run)
    text = msgspec.json.encode(_Envelope(xxhash.xxh3_64_hexdigest(body), msgspec.Raw(body)))
    part = directory / RUN_FILE_PART
    part.write_bytes(text + b"\n")
    os.replace(part, directory / RUN_FILE)


def decode_run_file(data: bytes, path: str) -> RunRecord:
    """The record in the bytes of a ``run.json``.

    Raises:
        TraceDamagedError: no such JSON, or it differs from its checksum.
        TraceVersionError: a newer RankLens is needed.
    """
    try:
        envelope = msgspec.json.decode(data, type=_Envelope)
    except DECODE_ERRORS as error:
        raise damaged(path, str(error)) from error
    body = bytes(envelope.run)
    if xxhash.xxh3_64_hexdigest(body) != envelope.checksum:
        raise damaged(path, "its content differs from its checksum")
    return decode_run(body, path)


def decode_run(body: bytes, path: str) -> RunRecord:
    """``RunRecord`` from JSON. The version is looked at first: the rest may have another shape.

    Raises:
        TraceDamagedError: not the JSON of a run, or an impossible one.
        TraceVersionError: a newer RankLens is needed.
    """
    try:
        version = msgspec.json.decode(body, type=_Version)
        if version.oldest_reader > TRACE_VERSION:
            raise TraceVersionError(
                f"{path} has format {version.format}, which needs a RankLens that reads format "
                f"{version.oldest_reader}; this one reads up to {TRACE_VERSION}. Upgrade RankLens: "
                "pip install --upgrade ranklens"
            )
        run = msgspec.json.decode(body, type=RunRecord)
    except DECODE_ERRORS as error:
        raise damaged(path, str(error)) from error
    if not 1 <= run.world_size <= MAX_WORLD_SIZE:
        raise damaged(path, f"a world of {run.world_size} ranks")
    return run
