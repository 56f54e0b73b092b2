"""The bytes of a trace: append-only files to write; local or remote files to read."""

from __future__ import annotations

import importlib
import mmap
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from ranklens_core.errors import TraceError, TraceFormatError, UsageError

Data = bytes | memoryview


class AppendFile(Protocol):
    """What the writer needs of a file (``io.FileIO`` has it)."""

    def write(self, data: Data, /) -> int | None: ...
    def truncate(self, size: int, /) -> int: ...
    def seek(self, offset: int, /) -> int: ...
    def close(self) -> None: ...


Opener = Callable[[Path], AppendFile]


def open_new(path: Path) -> AppendFile:
    """Create ``path`` for writing; FileExistsError if it is there.

    Unbuffered: what was written survives a kill of the process, and a forked child has no
    buffer that it could write a second time.
    """
    return path.open("xb", buffering=0)


def write_all(file: AppendFile, data: Data) -> None:
    """Write all of ``data`` (a raw file may take less at once).

    Raises:
        OSError: the file system took no more.
    """
    rest = memoryview(data).cast("B")
    while rest:
        written = file.write(rest)
        if not written:
            raise OSError("the file system accepts no more data")
        rest = rest[written:]


class TraceFiles(Protocol):
    """A trace's directory, to read from."""

    path: str

    def names(self) -> list[str] | None:
        """Sorted names in the directory; None if there is none.

        Raises:
            TraceFormatError: it is a file.
            TraceError: it cannot be read.
        """
        ...

    def data(self, name: str) -> memoryview | None:
        """All bytes of a file (``rank-00005/calls.arrows``), read-only; None if there is no such file.

        Raises:
            TraceError: it is there but cannot be read.
        """
        ...


class LocalFiles:
    """Files of this host, memory-mapped."""

    def __init__(self, path: str) -> None:
        self.path = path
        # the program that is being replayed may change the working directory
        self._root = os.path.abspath(path)

    def names(self) -> list[str] | None:
        try:
            return sorted(os.listdir(self._root))
        except FileNotFoundError:
            return None
        except NotADirectoryError as error:
            raise TraceFormatError(f"{self.path} is a file; a trace is a directory. Name that.") from error
        except OSError as error:
            raise _unreadable(self.path, error) from error

    def data(self, name: str) -> memoryview | None:
        try:
            # O_NONBLOCK: opening a pipe that lies there in a file's place would wait for ever
            with open(os.path.join(self._root, name), "rb", opener=_open_at_once) as file:
                if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                    raise ValueError("it is no regular file")
                if os.fstat(file.fileno()).st_size == 0:
                    return memoryview(b"")
                return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise _unreadable(os.path.join(self.path, name), error) from error


def _open_at_once(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


class RemoteFiles:
    """Files behind an fsspec URL; each is fetched whole when it is first needed."""

    def __init__(self, url: str) -> None:
        try:
            fsspec: Any = importlib.import_module("fsspec")
        except ImportError as error:
            raise UsageError(f"{url}: traces by URL need fsspec: pip install fsspec") from error
        try:
            self._system, self._root = fsspec.core.url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise UsageError(f"{url}: {error}") from error
        self.path = url

    def names(self) -> list[str] | None:
        try:
            if not self._system.isdir(self._root):
                return None
            return sorted(
                str(name).rstrip("/").rsplit("/", 1)[-1] for name in self._system.ls(self._root, detail=False)
            )
        except OSError as error:
            raise _unreadable(self.path, error) from error

    def data(self, name: str) -> memoryview | None:
        try:
            return memoryview(bytes(self._system.cat_file(f"{self._root}/{name}")))
        except FileNotFoundError:
            return None
        except OSError as error:
            raise _unreadable(f"{self.path}/{name}", error) from error


def trace_files(path: str | os.PathLike[str]) -> TraceFiles:
    """The files at ``path``, a local directory or any URL that fsspec knows.

    Raises:
        UsageError: a URL, but fsspec or its protocol is not installed.
    """
    text = os.fspath(path)
    if "://" in text:
        return RemoteFiles(text.rstrip("/"))
    return LocalFiles(text)


def _unreadable(path: str, error: Exception) -> TraceError:
    reason = getattr(error, "strerror", None) or str(error)
    return TraceError(
        f"{path} cannot be read: {reason}. Check that it is a file of a trace and its permissions."
    )
