"""Communication in the program's own profile (``torch.profiler``): spans where the program is held.

A span has the name that torch gives the call on this backend (``gloo:all_reduce``), and in it, told
apart, waiting for peers and the transfer. Arguments carry Kineto's own names, those it writes for NCCL,
and ours; Kineto keeps arguments where the program asked for ``record_shapes``. While no profiler is active
on the thread, nothing is made.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch._C._profiler import _RecordFunctionFast

from ranklens_core.c10d.signature import Interned
from ranklens_core.schema import NO_PEER, CallRecord, GroupRecord

is_profiling = torch._C._autograd._profiler_enabled
"""Whether a profiler watches the calling thread (30 ns)."""

_SCALAR_TYPES = {
    "float32": "Float",
    "float64": "Double",
    "float16": "Half",
    "bfloat16": "BFloat16",
    "int64": "Long",
    "int32": "Int",
    "int16": "Short",
    "int8": "Char",
    "uint8": "Byte",
    "bool": "Bool",
    "float8_e4m3fn": "Float8_e4m3fn",
    "float8_e5m2": "Float8_e5m2",
}
"""torch's dtypes as C++ and Kineto spell them (c10/core/ScalarType.h)."""


class Subject(NamedTuple):
    """The call a span is about. ``operator`` is the c10d operator's name."""

    operator: str
    interned: Interned
    record: CallRecord | None


class Spans:
    """Makes the spans; ``groups`` are the process groups by key, for their names and roles."""

    def __init__(self, groups: Mapping[str, GroupRecord]) -> None:
        self._groups = groups
        self._fixed: dict[int, dict[str, Any]] = {}

    def communication(self, subject: Subject, source: str) -> AbstractContextManager[object]:
        """A call while it holds the program."""
        signature = subject.interned.signature
        group = self._groups.get(signature.group)
        backend = group.backend.rpartition(":")[2] if group and group.backend else "c10d"
        return _span(f"{backend}:{signature.op}", self.arguments(subject, source))

    def waiting(self, subject: Subject, source: str) -> AbstractContextManager[object]:
        """The part in which peers are not there yet."""
        return _span(f"ranklens::wait_peers {self._label(subject)}", self.arguments(subject, source))

    def transfer(self, subject: Subject, source: str) -> AbstractContextManager[object]:
        """The part in which all are there."""
        return _span(f"ranklens::transfer {self._label(subject)}", self.arguments(subject, source))

    def _label(self, subject: Subject) -> str:
        """The group in a word: what profiles are summed up by."""
        key = subject.interned.signature.group
        group = self._groups.get(key)
        return (group.role or group.pg_desc or key) if group else key

    def arguments(self, subject: Subject, source: str) -> dict[str, Any]:
        """Everything about the call; ``Seq`` is its ``seq_id``, ``time`` where its time comes from."""
        fixed = self._fixed.get(subject.interned.id)
        if fixed is None:
            fixed = self._fixed[subject.interned.id] = self._describe(subject)
        arguments = {**fixed, "time": str(source)}
        if subject.record is not None:
            row = subject.record.row
            arguments |= {"Seq": row.seq_id, "entry": row.entry, "step": row.step}
        return arguments

    def _describe(self, subject: Subject) -> dict[str, Any]:
        signature = subject.interned.signature
        dtypes = signature.in_dtypes or signature.out_dtypes
        found: dict[str, Any] = {
            "scope": "user_scope",  # read by torch: an annotation, as torch's own spans are
            "Collective name": subject.operator.rstrip("_"),
            "dtype": _SCALAR_TYPES.get(dtypes[0], dtypes[0]) if dtypes else "",
            "In msg nelems": _elements(signature.in_shapes),
            "Out msg nelems": _elements(signature.out_shapes),
            "in_msg_bytes": signature.in_msg_bytes,
            "out_msg_bytes": signature.out_msg_bytes,
            "group": signature.group,
            "async": signature.is_async,
        }
        if signature.in_split_sizes or signature.out_split_sizes:
            found["In split size"] = str(list(signature.in_split_sizes))
            found["Out split size"] = str(list(signature.out_split_sizes))
        group = self._groups.get(signature.group)
        if group is not None:
            found |= {
                "role": group.role,
                "Group size": len(group.ranks),
                "Process Group Name": group.pg_name,
                "Process Group Description": group.pg_desc or "undefined",
                "Process Group Ranks": str(list(group.ranks)),
            }
            if signature.peer != NO_PEER:
                word = {"send": "Dst Rank", "recv": "Src Rank"}.get(signature.op, "Root Rank")
                found[word] = group.ranks[signature.peer]
        return found


def _span(name: str, arguments: dict[str, Any]) -> AbstractContextManager[object]:
    made: AbstractContextManager[object] = _RecordFunctionFast(name, [], arguments)
    return made


def _elements(shapes: tuple[tuple[int, ...], ...]) -> int:
    return sum(torch.Size(shape).numel() for shape in shapes)
