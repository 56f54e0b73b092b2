"""Where in the program a call was made, and what for, from the Python stack.

Looked up for every call, so frames are judged once per code object and only integers are compared.
"""

from __future__ import annotations

import sys
import sysconfig
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType

import torch

from ranklens_core.schema import Purpose

_TORCH = str(Path(torch.__file__).parent) + "/"
_ROOT = Path(__file__).parents[2]
_OURS = str(Path(__file__).parents[1]) + "/"
_ADAPTERS = tuple(f"{_ROOT}/ranklens_{framework}/" for framework in ("deepspeed", "megatron"))
_EXAMPLES = tuple(f"{folder}examples/" for folder in _ADAPTERS)
"""What the adapters' packages hold that is somebody's program."""

_NOT_THE_PROGRAM = tuple(
    {
        *(path.rstrip("/") + "/" for path in sysconfig.get_paths().values() if path),
        _OURS,
        "<frozen",
        "<string>",
    }
)

_OBJECT_FUNCTIONS = frozenset(
    {
        "all_gather_object",
        "gather_object",
        "broadcast_object_list",
        "scatter_object_list",
        "send_object_list",
        "recv_object_list",
        "_send_object",
        "_recv_object",
    }
)


@dataclass(frozen=True)
class Site:
    """``site``: innermost frame outside torch; ``program_site``: innermost in the user's files.

    Both are ``file:line function``, ``""`` where there is none.
    """

    site: str
    program_site: str
    purpose: Purpose | None


NOWHERE = Site("", "", None)
"""The site of a call that nobody asks about."""


class _Code:
    __slots__ = ("code", "is_program", "is_torch", "purpose")

    def __init__(self, code: CodeType, timer_files: tuple[str, ...]) -> None:
        self.code = code  # kept alive: it is known by its id
        name = code.co_filename
        ours = name.startswith(_OURS) or (name.startswith(_ADAPTERS) and not name.startswith(_EXAMPLES))
        self.is_torch = ours or name.startswith(_TORCH) or name == "<string>"
        self.is_program = not ours and not name.startswith(_NOT_THE_PROGRAM)
        self.purpose: Purpose | None = None
        if self.is_torch and code.co_name in _OBJECT_FUNCTIONS:
            self.purpose = Purpose.OBJECT
        elif name.endswith(timer_files):
            self.purpose = Purpose.TIMER


class Sites:
    """Finds the ``Site`` of the call being made. ``timer_files`` are path endings of modules that
    communicate only to time themselves (Megatron's timers)."""

    def __init__(self, timer_files: tuple[str, ...] = ()) -> None:
        self._timer_files = timer_files
        # by id: code objects are equal if they do the same in the same line, whatever their file
        self._codes: dict[int, _Code] = {}
        self._sites: dict[tuple[object, ...], Site] = {}
        self._interned: dict[Site, Site] = {}

    def find(self) -> Site:
        """The site of the calling stack."""
        frame: FrameType | None = sys._getframe(1)
        codes = self._codes
        site: FrameType | None = None
        purpose: Purpose | None = None
        while frame is not None:
            code = frame.f_code
            known = codes.get(id(code))
            if known is None:
                known = codes[id(code)] = _Code(code, self._timer_files)
            if purpose is None:
                purpose = known.purpose
            if site is None and not known.is_torch:
                site = frame
            if known.is_program:
                break
            frame = frame.f_back
        # not f_lineno: python counts it out of a table each time
        key = (
            site and (id(site.f_code), site.f_lasti),
            frame and (id(frame.f_code), frame.f_lasti),
            purpose,
        )
        found = self._sites.get(key)
        if found is None:
            new = Site(_text(site), _text(frame), purpose)
            found = self._sites[key] = self._interned.setdefault(new, new)
        return found


def program_place(frames: Iterable[tuple[CodeType, int]]) -> str:
    """``file:line function`` of the first of ``frames`` (innermost first) in the user's own files, ``""`` if
    none is."""
    for code, line in frames:
        if not code.co_filename.startswith(_NOT_THE_PROGRAM):
            return f"{code.co_filename}:{line} {code.co_name}"
    return ""


def thread_place(thread_id: int) -> str:
    """Where in the user's own files a thread is just now; ``""`` if nowhere."""
    frame = sys._current_frames().get(thread_id)
    frames = []
    while frame is not None:
        frames.append((frame.f_code, frame.f_lineno or 0))
        frame = frame.f_back
    return program_place(frames)


def error_place(error: BaseException) -> str:
    """Where in the user's own files ``error`` was raised; ``""`` if nowhere."""
    frames = [(frame.f_code, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    return program_place(reversed(frames))


def _text(frame: FrameType | None) -> str:
    if frame is None:
        return ""
    return f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_name}"
