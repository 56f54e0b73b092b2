"""A PyTorch Flight Recorder dump, read without running anything in it.

torch writes a pickle (``_dump_nccl_trace``, ``_dump_fr_trace``; the watchdog's file is
TORCH_FR_DUMP_TEMP_FILE plus the rank) or JSON (``_dump_nccl_trace_json``, ``_dump_fr_trace_json``) of the
same fields: torch's ``FlightRecorder.hpp``, versions 2.x, which ``torch.distributed.flight_recorder`` reads.
A dump is a stranger's file and a pickle can call any function: this one may only build dicts, lists,
tuples, strings and numbers.
"""

from __future__ import annotations

import io
import pickle
import re
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from ranklens_core.errors import TraceDamagedError, TraceError, TraceFormatError, TraceVersionError

OLDEST_VERSION = 2
"""Major version from which calls have ``collective_seq_id`` and ``p2p_seq_id``."""

_RANK = re.compile(r"(\d+)$")
_PICKLE, _JSON = b"\x80", b"{"


class Frame(msgspec.Struct, frozen=True):
    """A line of the program; a call's begin with the innermost."""

    name: str = ""
    filename: str = ""
    line: int = 0


class Entry(msgspec.Struct, frozen=True):
    """A call. Sizes are the tensors' shapes; times are of the host's wall clock, None or 0 if unknown."""

    process_group: tuple[str, str]
    profiling_name: str
    collective_seq_id: int
    p2p_seq_id: int
    state: str
    time_created_ns: int
    record_id: int = 0
    is_p2p: bool = False
    retired: bool = False
    input_sizes: tuple[tuple[int, ...], ...] = ()
    input_dtypes: tuple[str, ...] = ()
    output_sizes: tuple[tuple[int, ...], ...] = ()
    output_dtypes: tuple[str, ...] = ()
    time_discovered_completed_ns: int | None = None
    frames: tuple[Frame, ...] = ()


class GroupConfig(msgspec.Struct, frozen=True):
    """A process group; ``ranks`` is the text of a list."""

    name: str = ""
    desc: str = ""
    ranks: str = "[]"


class Dump(msgspec.Struct, frozen=True):
    """One rank's dump."""

    version: str
    entries: tuple[Entry, ...] = ()
    pg_config: dict[str, GroupConfig] = {}


class _Plain(pickle.Unpickler):
    """Builds containers, strings and numbers only."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"it wants to load {module}.{name}")


def dump_files(path: Path) -> dict[int, Path]:
    """The dumps at ``path`` (a directory, or one file) by rank: files whose name ends in a number and whose
    content begins like a dump. Of a pickle and a JSON of one rank the pickle, which has the program's lines.

    Raises TraceError if ``path`` cannot be read.
    """
    try:
        files = sorted(path.iterdir()) if path.is_dir() else [path]
        found: dict[int, Path] = {}
        for file in files:
            match = _RANK.search(re.sub(r"\.(json|pkl|pickle)$", "", file.name))
            if match is None or not file.is_file():
                continue
            with file.open("rb") as opened:
                first = opened.read(1)
            rank = int(match[1])
            if first == _PICKLE or (first == _JSON and rank not in found):
                found[rank] = file
    except OSError as error:
        raise TraceError(f"{path} cannot be read: {error.strerror or error}.") from error
    return found


def read_dump(path: Path) -> Dump:
    """The dump in ``path``.

    Raises:
        TraceDamagedError: it is no dump, or asks for more than plain data.
        TraceVersionError: it is of a format before version 2.
        TraceError: it cannot be read.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise TraceError(f"{path} cannot be read: {error.strerror or error}.") from error
    content = _plain(data, path)
    version = str(content.get("version", "")) if isinstance(content, dict) else ""
    if not re.match(r"\d+", version):
        raise TraceFormatError(
            f"{path} is no Flight Recorder dump: it has no version. Name a file that torch dumped."
        )
    if int(version.split(".")[0]) < OLDEST_VERSION:
        raise TraceVersionError(
            f"{path} is a Flight Recorder dump of version {version}; RankLens reads {OLDEST_VERSION}.0 and "
            "later (torch 2.4 and later). Dump again with a newer torch."
        )
    try:
        return msgspec.convert(content, Dump, strict=False)
    except (msgspec.ValidationError, RecursionError) as error:
        raise TraceDamagedError(f"{path} is no Flight Recorder dump of version {version}: {error}") from error


def _plain(data: bytes, path: Path) -> Any:
    try:
        if data[:1] == _JSON:
            return msgspec.json.decode(data)
        return _Plain(io.BytesIO(data)).load()
    except Exception as error:  # a crafted pickle makes its reader raise anything
        raise TraceDamagedError(
            f"{path} cannot be read as a Flight Recorder dump: {type(error).__name__}: {error}. "
            "Nothing in it was run."
        ) from error
