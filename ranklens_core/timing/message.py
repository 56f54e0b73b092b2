"""What a call moves: the op's standard name and its message size as nccl-tests counts it."""

from __future__ import annotations

from ranklens_core.errors import UsageError

# Each name torch or a framework uses for an op, and the op that is estimated for it. A coalesced form is
# one launch over the summed bytes, as NCCL aggregates the calls of one group. A barrier is NCCL's: torch
# runs an all-reduce of one element.
_STANDARD_OP = {
    "all_reduce": "all_reduce",
    "barrier": "all_reduce",
    "monitored_barrier": "all_reduce",
    "all_gather": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all": "all_to_all",
    "all_to_all_single": "all_to_all",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "gather": "gather",
    "scatter": "scatter",
    "send": "send_recv",
    "recv": "send_recv",
    "recv_any_source": "send_recv",
    "send_recv": "send_recv",
}
BARRIERS = frozenset({"barrier", "monitored_barrier"})
BARRIER_BYTES = 4
REDUCING_OPS = frozenset({"all_reduce", "reduce_scatter", "reduce"})


def standard_op(op: str) -> str:
    """``all_gather_into_tensor_coalesced`` -> ``all_gather``. Raises UsageError for an unknown op."""
    name = op.removesuffix("_coalesced")
    if name not in _STANDARD_OP:
        known = ", ".join(sorted(_STANDARD_OP))
        raise UsageError(f"no estimate for op {op!r}; known ops (also with _coalesced): {known}")
    return _STANDARD_OP[name]


def message_bytes(op: str, n_ranks: int, in_bytes: int, out_bytes: int) -> int:
    """The size nccl-tests would print for this call, in bytes.

    All-reduce, broadcast, reduce and p2p: the tensor. All-gather and gather: everything gathered.
    Reduce-scatter, scatter and all-to-all: everything one rank hands in (uneven all-to-all: the larger side).
    ``in_bytes`` and ``out_bytes`` are this rank's; a rank that has only one side (a gather's non-root)
    gives 0 for the other. Source: nccl-tests doc/PERFORMANCE.md and the *GetCollByteCount functions (2.x).
    """
    if in_bytes < 0 or out_bytes < 0:
        raise UsageError(f"{op}: negative size (in_bytes={in_bytes}, out_bytes={out_bytes})")
    if op.removesuffix("_coalesced") in BARRIERS:
        return BARRIER_BYTES
    match standard_op(op):
        case "all_gather" | "gather":
            return max(out_bytes, in_bytes * n_ranks)
        case "reduce_scatter" | "scatter":
            return max(in_bytes, out_bytes * n_ranks)
        case _:
            return max(in_bytes, out_bytes)
