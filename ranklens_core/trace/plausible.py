"""What a recording can never hold, whatever its checksums say: a trace is a stranger's data.

Each function returns what is wrong with the first impossible record, in words that name it, or ``""``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ranklens_core.schema import NO_PEER, NO_STEP, GroupRecord, Signature, Step

Ints = npt.NDArray[np.int64]

ANY_SOURCE = "recv_any_source"
"""The one operator whose completion tells the program a rank."""


def group_problem(group: GroupRecord, rank: int, world_size: int) -> str:
    """A group that ``rank`` recorded in a world of ``world_size``."""
    if rank not in group.ranks:
        return f"rank {rank} is not in its own group {group.key}"
    if len(set(group.ranks)) != len(group.ranks):
        return f"group {group.key} has a rank twice"
    outside = [member for member in group.ranks if not 0 <= member < world_size]
    if outside:
        return f"group {group.key} has rank {outside[0]} in a world of {world_size}"
    return ""


def step_problem(step: Step, before: int) -> str:
    """A step that follows the one with index ``before``."""
    if step.index <= max(before, NO_STEP):
        return f"step {step.index} follows step {before}"
    if step.end_ns < step.begin_ns:
        return f"step {step.index} ends before it begins"
    return ""


def signature_problem(signature: Signature, group_sizes: Mapping[str, int]) -> str:
    """A signature that contradicts itself or its group (sizes by key)."""
    if len(signature.in_dtypes) != len(signature.in_shapes):
        return f"has {len(signature.in_dtypes)} input dtypes and {len(signature.in_shapes)} shapes"
    if len(signature.out_dtypes) != len(signature.out_shapes):
        return f"has {len(signature.out_dtypes)} output dtypes and {len(signature.out_shapes)} shapes"
    for shape in (*signature.in_shapes, *signature.out_shapes):
        if min(shape, default=0) < 0:
            return f"has a tensor of shape {shape}"
    for name in ("in_split_sizes", "out_split_sizes"):
        if min(getattr(signature, name), default=0) < 0:
            return f"has {name} {getattr(signature, name)}"
    if min(signature.in_msg_bytes, signature.out_msg_bytes) < 0:
        return f"moves {min(signature.in_msg_bytes, signature.out_msg_bytes)} bytes"
    size = group_sizes.get(signature.group)
    if size is None:
        return f"is of the group {signature.group!r}, which this rank never made"
    if signature.peer != NO_PEER and not 0 <= signature.peer < size:
        return f"has peer {signature.peer} in a group of {size}"
    return ""


def call_problem(calls: pa.Table, signatures: Sequence[Signature]) -> str:
    """Columns of ``CallRow``."""
    number = _ints(calls, "signature")
    wrong = (number < 0) | (number >= len(signatures))
    if wrong.any():
        return f"{_entry(calls, wrong)} has signature {number[wrong][0]} of {len(signatures)}"
    lowest = {"seq_id": 0, "step": NO_STEP, "batch": -1, "enqueue_ns": 0, "start_ns": 0}
    lowest |= {"compute_ns": 0, "compute_cpu_ns": 0}
    return _too_low(calls, lowest) or _wrong_count(
        calls, "in_addresses", np.array([len(s.in_shapes) for s in signatures], np.int64)[number], "inputs"
    )


def completion_problem(
    completions: pa.Table, calls: pa.Table, signatures: Sequence[Signature], group_sizes: Mapping[str, int]
) -> str:
    """Columns of ``CompletionRow``; ``calls`` and ``signatures`` are without problem."""
    unknown, place = _places(completions, "entry", calls)
    if unknown.any():
        return f"{_entry(completions, unknown)} ended, but was never issued"
    number = _ints(calls, "signature")[place]
    problem = _too_low(completions, {"end_ns": 0, "return_ns": 0}) or _wrong_count(
        completions,
        "out_addresses",
        np.array([len(s.out_shapes) for s in signatures], np.int64)[number],
        "outputs",
    )
    if problem:
        return problem
    source = _ints(completions, "src_rank")
    size = np.array([group_sizes[s.group] for s in signatures], np.int64)[number]
    takes_any = np.array([s.op == ANY_SOURCE for s in signatures], np.bool_)[number]
    succeeded = pc.equal(completions["error"], "").to_numpy()
    needs_source = takes_any & succeeded
    wrong = ((source != NO_PEER) | needs_source) & ((source < 0) | (source >= size))
    if wrong.any():
        return (
            f"{_entry(completions, wrong)} came from rank {source[wrong][0]} in a group of {size[wrong][0]}"
        )
    return ""


def wait_problem(waits: pa.Table, calls: pa.Table) -> str:
    """Columns of ``WaitRow``; ``calls`` are without problem."""
    unknown, _ = _places(waits, "call", calls)
    unknown |= _ints(waits, "call") >= _ints(waits, "entry")
    if unknown.any():
        waited_for = _ints(waits, "call")[unknown][0]
        return f"{_entry(waits, unknown)} waits for entry {waited_for}, which is no call before it"
    problem = _too_low(waits, {"begin_ns": 0, "compute_ns": 0, "compute_cpu_ns": 0})
    backwards = _ints(waits, "end_ns") < _ints(waits, "begin_ns")
    if not problem and backwards.any():
        return f"{_entry(waits, backwards)} ends before it begins"
    return problem


def _places(table: pa.Table, column: str, calls: pa.Table) -> tuple[npt.NDArray[np.bool_], Ints]:
    """For each row, whether the entry in ``column`` is no call's, and else the row of that call."""
    found = pc.index_in(table[column], value_set=calls["entry"])
    return pc.is_null(found).to_numpy(), pc.fill_null(found, 0).to_numpy()


def _too_low(table: pa.Table, lowest: Mapping[str, int]) -> str:
    for name, limit in lowest.items():
        values = _ints(table, name)
        wrong = values < limit
        if wrong.any():
            return f"{_entry(table, wrong)} has {name} {values[wrong][0]}"
    return ""


def _wrong_count(table: pa.Table, name: str, wanted: Ints, of_what: str) -> str:
    """Addresses are kept for all tensors of a call, or for none."""
    counts = pc.list_value_length(table[name]).to_numpy().astype(np.int64)
    wrong = (counts != 0) & (counts != wanted)
    if not wrong.any():
        return ""
    return f"{_entry(table, wrong)} has {counts[wrong][0]} addresses for {wanted[wrong][0]} {of_what}"


def _ints(table: pa.Table, name: str) -> Ints:
    values: Ints = table[name].to_numpy()
    return values


def _entry(table: pa.Table, wrong: npt.NDArray[np.bool_]) -> str:
    return f"entry {_ints(table, 'entry')[wrong][0]}"
