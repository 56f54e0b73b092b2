"""The table of c10d operators, and how to read a call's arguments.

Positions come from the operators' schemas, never from counting: trailing arguments that equal
their default may be left out of a boxed call, and torch adds arguments between versions.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, NamedTuple

import torch

from ranklens_core.errors import UnknownOperatorError


class Kind(StrEnum):
    """How the operator pairs ranks."""

    COLLECTIVE = "collective"
    SEND = "send"
    RECV = "recv"
    SYNC = "sync"


class Returns(StrEnum):
    """What the operator's kernel gives back."""

    OUTPUTS_AND_WORK = "outputs, work"
    WORK = "work"
    NOTHING = "nothing"


class Positions(NamedTuple):
    """Where an operator has which argument; -1 (the None at the end of ``values``) where it has none."""

    process_group: int
    inputs: int
    outputs: int
    peer: int
    reduce_op: int
    tag: int
    in_split_sizes: int
    out_split_sizes: int
    async_op: int
    device_tensor: int


_NOWHERE = Positions(*[-1] * len(Positions._fields))


@dataclass(frozen=True)
class Operator:
    """One c10d operator.

    ``inputs`` and ``outputs`` name the schema arguments that hold tensors (``""``: none);
    ``peer`` names the argument with the root, source or destination group rank. ``root_sends``
    says that only the root's input carries information (broadcast, scatter), ``in_place`` that
    input and output are the same tensors. ``at`` and ``defaults`` (by position, None for arguments
    without one) are filled from the schema.
    """

    name: str
    op: str
    kind: Kind
    inputs: str
    outputs: str
    peer: str = ""
    root_sends: bool = False
    in_place: bool = False
    at: Positions = _NOWHERE
    defaults: tuple[Any, ...] = ()
    returns: Returns = Returns.WORK

    def values(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Boxed positional ``args`` with left-out defaults filled in and a None at the end."""
        return (*args, *self.defaults[len(args) :], None)


def _collective(name: str, op: str, inputs: str, outputs: str, **more: Any) -> Operator:
    return Operator(name, op, Kind.COLLECTIVE, inputs, outputs, **more)


_TABLE = (
    _collective("allreduce_", "all_reduce", "tensors", "tensors", in_place=True),
    _collective("allreduce_coalesced_", "all_reduce_coalesced", "tensors", "tensors", in_place=True),
    _collective("reduce_", "reduce", "tensors", "tensors", peer="root_rank", in_place=True),
    _collective(
        "broadcast_", "broadcast", "tensors", "tensors", peer="root_rank", root_sends=True, in_place=True
    ),
    _collective("allgather_", "all_gather", "input_tensors", "output_tensors"),
    _collective("_allgather_base_", "all_gather_into_tensor", "input_tensor", "output_tensor"),
    _collective("allgather_coalesced_", "all_gather_coalesced", "input_list", "output_lists"),
    _collective("allgather_into_tensor_coalesced_", "all_gather_into_tensor_coalesced", "inputs", "outputs"),
    _collective("reduce_scatter_", "reduce_scatter", "input_tensors", "output_tensors"),
    _collective("_reduce_scatter_base_", "reduce_scatter_tensor", "input_tensor", "output_tensor"),
    _collective("reduce_scatter_tensor_coalesced_", "reduce_scatter_tensor_coalesced", "inputs", "outputs"),
    _collective("gather_", "gather", "input_tensors", "output_tensors", peer="root_rank"),
    _collective("scatter_", "scatter", "input_tensors", "output_tensors", peer="root_rank", root_sends=True),
    _collective("alltoall_", "all_to_all", "input_tensors", "output_tensors"),
    _collective("alltoall_base_", "all_to_all_single", "input", "output"),
    Operator("send", "send", Kind.SEND, "tensors", "", peer="dst"),
    Operator("recv_", "recv", Kind.RECV, "", "tensors", peer="src"),
    Operator("recv_any_source_", "recv_any_source", Kind.RECV, "", "tensors"),
    Operator("barrier", "barrier", Kind.SYNC, "", ""),
    Operator("monitored_barrier_", "monitored_barrier", Kind.SYNC, "", ""),
)

_NOT_COMMUNICATION = frozenset({"check_for_nan"})
"""c10d operators that touch this rank alone; they keep their own kernels."""


def operators() -> tuple[Operator, ...]:
    """The operators of the installed torch, positions and defaults read from their schemas.

    Raises ``UnknownOperatorError`` if torch has a c10d operator that the table lacks: passing it
    through silently would lose a call.
    """
    # no public API lists the operators of a namespace together with their argument defaults
    schemas: dict[str, Any] = {
        schema.name.removeprefix("c10d::"): schema
        for schema in torch._C._jit_get_all_schemas()
        if schema.name.startswith("c10d::")
    }
    known = {operator.name: operator for operator in _TABLE}
    unknown = sorted(schemas.keys() - known.keys() - _NOT_COMMUNICATION)
    if unknown:
        raise UnknownOperatorError(
            f"torch {torch.__version__} has c10d operators that RankLens does not know: "
            f"{', '.join('c10d::' + name for name in unknown)}. Their calls would be lost. "
            "Install a RankLens that supports this torch, or an older torch."
        )
    return tuple(_with_schema(operator, schemas[name]) for name, operator in known.items() if name in schemas)


def _with_schema(operator: Operator, schema: Any) -> Operator:
    names = [argument.name for argument in schema.arguments]

    def at(name: str) -> int:
        return names.index(name) if name in names else -1

    return replace(
        operator,
        at=Positions(
            process_group=at("process_group"),
            inputs=at(operator.inputs),
            outputs=at(operator.outputs),
            peer=at(operator.peer),
            reduce_op=at("reduce_op"),
            tag=at("tag"),
            in_split_sizes=at("input_split_sizes"),
            out_split_sizes=at("output_split_sizes"),
            async_op=at("async_op"),
            device_tensor=at("tensor"),
        ),
        defaults=tuple(a.default_value if a.has_default_value() else None for a in schema.arguments),
        returns=(Returns.NOTHING, Returns.WORK, Returns.OUTPUTS_AND_WORK)[len(schema.returns)],
    )
