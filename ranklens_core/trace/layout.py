"""Where things lie in a trace directory, and making room for a new one."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path

from ranklens_core.errors import UsageError

RUN_FILE = "run.json"
RUN_FILE_PART = "run.json.part"
ENDING_FILE = "ending.json"
JOURNAL_FILE = "journal.jsonl"

MAX_WORLD_SIZE = 1 << 20
"""A trace that claims more ranks is taken for damaged: no job is that large."""

_RANK_DIRECTORY = re.compile(r"rank-(\d{5,7})")
_RANK_FILE = re.compile(r"journal\.jsonl|[a-z]+\.arrows|payload-\d{3,}\.bin")


def rank_directory(rank: int) -> str:
    """Name of the directory of global rank ``rank``: ``rank-00005``."""
    return f"rank-{rank:05d}"


def payload_file(number: int) -> str:
    """Name of a rank's payload file: ``payload-000.bin``."""
    return f"payload-{number:03d}.bin"


def rank_of_directory(name: str) -> int | None:
    """The rank whose directory is called ``name``; None if no rank's directory is."""
    match = _RANK_DIRECTORY.fullmatch(name)
    if match is None or rank_directory(int(match[1])) != name:
        return None
    return int(match[1])


def prepare_directory(path: Path, overwrite: bool = False, *, rank: int | None = None) -> None:
    """Make ``path`` an empty directory for a new trace.

    With ``rank``, only that rank's directory in ``path`` must be new: for jobs whose ranks start
    on their own and share ``path``.

    ``overwrite`` deletes what an earlier recording left there, and only that: a directory with
    anything else in it is refused untouched.

    Raises:
        UsageError: ``path`` is not empty, holds what is no trace, or cannot be written.
    """
    target = path if rank is None else path / rank_directory(rank)
    try:
        target.mkdir(parents=True, exist_ok=True)
        if rank is not None:
            _refuse_strangers(path, path.iterdir(), deep=False)
        if any(target.iterdir()):
            if not overwrite:
                raise UsageError(
                    f"{target} is not empty: RankLens does not write over it. Name another directory "
                    "with --out, or replace the trace that is there with --overwrite."
                )
            _delete_trace(path, rank)
        _check_writable(target)
    except OSError as error:
        raise UsageError(
            f"{target} cannot be used for a trace: {error.strerror or error}. Name a directory that this "
            "user can write with --out."
        ) from error


def remove_ranks_outside(path: Path, world_size: int, overwrite: bool) -> None:
    """Make sure that ``path`` holds no ranks of an earlier, larger job. For one rank a host to call.

    Raises:
        UsageError: it does and ``overwrite`` is not set, or they hold what is no trace, or cannot be deleted.
    """
    try:
        names = os.listdir(path) if path.is_dir() else []
        ranks = [rank for name in names if (rank := rank_of_directory(name)) is not None]
        outside = [path / rank_directory(rank) for rank in sorted(ranks) if rank >= world_size]
        if outside and not overwrite:
            raise UsageError(
                f"{path} holds {outside[0].name} of a larger job than this one of {world_size} ranks. Name "
                "another directory with --out, or replace the trace that is there with --overwrite."
            )
        _refuse_strangers(path, outside, deep=True)
        for directory in outside:
            shutil.rmtree(directory)
    except OSError as error:
        raise UsageError(
            f"{path} cannot be used for a trace: {error.strerror or error}. Name a directory that this user "
            "can write with --out."
        ) from error


def check_replaceable(path: Path) -> None:
    """Make sure that ``replace_trace`` may take what is at ``path`` away: a trace, or nothing.

    Raises:
        UsageError: it is something else.
    """
    if path.is_symlink() or (path.exists() and not path.is_dir()):
        raise UsageError(f"{path} is no directory of a trace: RankLens does not replace it. Name another.")
    if path.is_dir():
        _refuse_strangers(path, sorted(path.iterdir()), deep=True)


def replace_trace(new: Path, path: Path) -> None:
    """Put the finished trace ``new`` where ``path`` is, in place of the trace that may be there.

    They must be on one file system. A reader finds the old one, the new one or, for a moment, none; never a
    part of one.

    Raises:
        UsageError: what is at ``path`` is no trace, or cannot be replaced; it is then still there.
    """
    check_replaceable(path)
    aside = new.with_name(f"{new.name}.old")
    try:
        if path.exists():
            path.rename(aside)
        try:
            new.rename(path)
        except OSError:
            if aside.exists():
                aside.rename(path)
            raise
        if aside.exists():
            shutil.rmtree(aside)
    except OSError as error:
        raise UsageError(f"{path} cannot be replaced: {error.strerror or error}.") from error


def _delete_trace(path: Path, rank: int | None) -> None:
    """Delete the trace in ``path`` (or one rank's part) once all of it is known to be a trace."""
    entries = sorted(path.iterdir()) if rank is None else [path / rank_directory(rank)]
    _refuse_strangers(path, entries, deep=True)
    for entry in entries:
        if entry.is_dir():
            shutil.rmtree(entry)
        else:
            entry.unlink()
    if rank is not None:
        entries[0].mkdir()


def _refuse_strangers(path: Path, entries: Iterable[Path], *, deep: bool) -> None:
    """Raise UsageError if RankLens did not write one of ``entries`` of the trace directory ``path``.

    With ``deep``, the files in the ranks' directories are looked at too.
    """
    for entry in entries:
        inner = sorted(entry.iterdir()) if deep and entry.is_dir() and not entry.is_symlink() else []
        for candidate in (entry, *inner):
            # the rank that removes those of an earlier job may just have been here
            if not _is_ours(candidate, is_inner=candidate is not entry) and os.path.lexists(candidate):
                raise UsageError(
                    f"{path} holds {candidate.relative_to(path)}, which is no part of a trace: RankLens "
                    "neither writes beside it nor deletes it. Name another directory with --out."
                )


def _is_ours(path: Path, *, is_inner: bool) -> bool:
    """Whether RankLens writes something of this name and kind."""
    if path.is_symlink():
        return False
    if is_inner:
        return path.is_file() and _RANK_FILE.fullmatch(path.name) is not None
    if path.is_dir():
        return rank_of_directory(path.name) is not None
    return path.name in (RUN_FILE, RUN_FILE_PART, ENDING_FILE)


def _check_writable(directory: Path) -> None:
    """Raise the OSError that writing into ``directory`` would."""
    probe = directory / f".ranklens-{os.getpid()}"
    probe.touch()
    probe.unlink()
