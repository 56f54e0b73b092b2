"""What the calls of one collective must have in common, and which uneven ones fit together.

From the semantics of ``torch.distributed``: all members make the same op with the same reduce op, root
and dtype; even collectives move equally many elements (shapes may differ: only the number counts);
gather, scatter and all-to-all fit pair by pair.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from ranklens_core.schema import NO_PEER, Signature
from ranklens_core.timing.join import MESSAGE_OPS
from ranklens_core.timing.message import BARRIERS
from ranklens_core.timing.ranklog import Int64

UNKNOWN = -1
"""A number of elements that a call does not tell."""

PAIRWISE_OPS = frozenset({"all_to_all", "all_to_all_single", "gather", "scatter"})
"""Ops whose sizes are agreed between each two ranks, not among all."""

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
    if op in BARRIERS:
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
    size = len(signatures)
    sent, expected = np.full((size, size), UNKNOWN, np.int64), np.full((size, size), UNKNOWN, np.int64)
    for rank, signature in enumerate(signatures):
        if signature is not None:
            _fill(sent[rank], expected[:, rank], signature, rank)
    unfit = np.argwhere((sent != expected) & (sent != UNKNOWN) & (expected != UNKNOWN))
    if not len(unfit):
        return None
    sender, receiver = unfit[0].tolist()
    return sender, receiver, int(sent[sender, receiver]), int(expected[sender, receiver])


def numels(shapes: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Elements of each shape."""
    return tuple(math.prod(shape) for shape in shapes)


def _fill(sends: Int64, expects: Int64, signature: Signature, rank: int) -> None:
    """Put in how many elements ``rank`` sends to and expects from each member, where its call says so."""
    inputs, outputs, root = numels(signature.in_shapes), numels(signature.out_shapes), signature.peer
    match signature.op:
        case "all_to_all_single":
            _fill_split(sends, signature.in_shapes, signature.in_split_sizes)
            _fill_split(expects, signature.out_shapes, signature.out_split_sizes)
        case "all_to_all":
            _fill_each(sends, inputs)
            _fill_each(expects, outputs)
        case "gather":
            sends[root] = sum(inputs)
            if rank == root:
                _fill_each(expects, outputs)
        case "scatter":
            expects[root] = sum(outputs)
            if rank == root:
                _fill_each(sends, inputs)


def _fill_each(counts: Int64, of_each: Sequence[int]) -> None:
    if len(of_each) == len(counts):
        counts[:] = of_each


def _fill_split(counts: Int64, shapes: Sequence[Sequence[int]], splits: Sequence[int]) -> None:
    """By the splits of the first dimension, even ones where there are none."""
    if len(shapes) == 1 and shapes[0]:
        rows, elements = shapes[0][0], math.prod(shapes[0])
        if not splits:
            counts[:] = elements // len(counts)
        elif len(splits) == len(counts):
            counts[:] = np.array(splits, np.int64) * (elements // rows if rows else 0)


def _dtypes(dtypes: Sequence[str]) -> str:
    return ", ".join(dict.fromkeys(dtypes))


def _numbers(numbers: Sequence[int]) -> str:
    if len(numbers) > 1 and len(set(numbers)) == 1:
        return f"{len(numbers)} x {numbers[0]}"
    return ", ".join(map(str, numbers)) or "none"
