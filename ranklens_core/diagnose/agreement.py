"""What the calls of one collective must have in common, and which uneven ones fit together.

From the semantics of ``torch.distributed``: all members make the same op with the same reduce op, root
and dtype; even collectives move equally many elements (shapes may differ: only the number counts);
gather, scatter and all-to-all fit pair by pair.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from ranklens_core.schema import NO_PEER, Signature
from ranklens_core.timing.join import MESSAGE_OPS

PAIRWISE_OPS = frozenset({"all_to_all", "all_to_all_single", "gather", "scatter"})
"""Ops whose sizes are agreed between each two ranks, not among all."""

_BARRIERS = frozenset({"barrier", "monitored_barrier"})

Terms = Mapping[str, str]


def is_collective(signature: Signature) -> bool:
    return signature.op not in MESSAGE_OPS


def terms(signature: Signature, group_rank: int) -> Terms:
    """What the other members' calls must say too, by field; ``group_rank`` is who says it."""
    op = signature.op
    found = {"op": op}
    if signature.reduce_op:
        found["reduce_op"] = signature.reduce_op
    if signature.peer != NO_PEER:
        found["root"] = str(signature.peer)
    if op in _BARRIERS:
        return found
    found["device"] = signature.device
    found["dtype"] = _dtypes(signature.out_dtypes if op == "scatter" else signature.in_dtypes)
    if op in PAIRWISE_OPS:
        return found
    inputs, outputs = numels(signature.in_shapes), numels(signature.out_shapes)
    if op == "all_gather" and len(outputs) > 1:
        found["output elements"] = _numbers(outputs)
        own = outputs[group_rank] if group_rank < len(outputs) else -1
        if inputs != (own,):
            found["input elements"] = f"{_numbers(inputs)} for a place of {own}"
    elif op == "reduce_scatter" and len(inputs) > 1:
        found["input elements"] = _numbers(inputs)
        own = inputs[group_rank] if group_rank < len(inputs) else -1
        if outputs != (own,):
            found["output elements"] = f"{_numbers(outputs)} for a part of {own}"
    else:
        found["input elements"] = _numbers(inputs)
        if outputs != inputs:
            found["output elements"] = _numbers(outputs)
    return found


def unfit_pair(signatures: Sequence[Signature | None]) -> tuple[int, int, int, int] | None:
    """Whom a pairwise op does not fit: (sender, receiver, elements sent, elements expected), group ranks.

    ``signatures`` has every member's, None where it is not known; all are of the same op and root.
    """
    known = {rank: signature for rank, signature in enumerate(signatures) if signature is not None}
    parts = {rank: _parts(signature, rank, len(signatures)) for rank, signature in known.items()}
    for sender in known:
        for receiver in known:
            sent, expected = parts[sender][0].get(receiver), parts[receiver][1].get(sender)
            if sent is not None and expected is not None and sent != expected:
                return sender, receiver, sent, expected
    return None


def numels(shapes: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Elements of each shape."""
    return tuple(math.prod(shape) for shape in shapes)


def _parts(signature: Signature, rank: int, size: int) -> tuple[dict[int, int], dict[int, int]]:
    """Elements that ``rank`` sends to and expects from each member; those of unknown number are left out."""
    inputs, outputs = numels(signature.in_shapes), numels(signature.out_shapes)
    root = signature.peer

    def of_each(counts: tuple[int, ...]) -> dict[int, int]:
        return dict(enumerate(counts)) if len(counts) == size else {}

    match signature.op:
        case "all_to_all":
            return of_each(inputs), of_each(outputs)
        case "all_to_all_single":
            return (
                _split(signature.in_shapes, signature.in_split_sizes, size),
                _split(signature.out_shapes, signature.out_split_sizes, size),
            )
        case "gather":
            return {root: sum(inputs)}, of_each(outputs) if rank == root else {}
        case _:  # scatter
            return of_each(inputs) if rank == root else {}, {root: sum(outputs)}


def _split(shapes: Sequence[Sequence[int]], splits: Sequence[int], size: int) -> dict[int, int]:
    if len(shapes) != 1 or not shapes[0]:
        return {}
    rows, elements = shapes[0][0], math.prod(shapes[0])
    width = elements // rows if rows else 0
    if not splits:
        return dict.fromkeys(range(size), elements // size)
    return {rank: split * width for rank, split in enumerate(splits)}


def _dtypes(dtypes: Sequence[str]) -> str:
    return ", ".join(dict.fromkeys(dtypes))


def _numbers(numbers: Sequence[int]) -> str:
    if len(numbers) > 1 and len(set(numbers)) == 1:
        return f"{len(numbers)} x {numbers[0]}"
    return ", ".join(map(str, numbers)) or "none"
