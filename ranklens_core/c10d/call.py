"""One c10d call, decoded: what a handler is given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch._C._distributed_c10d import ProcessGroup, Work

from ranklens_core.c10d.ops import Kind, Operator
from ranklens_core.schema import NO_PEER

Proceed = Callable[[], Work | None]
"""Calls the original kernel; None where the operator has no handle (monitored barrier)."""

_REDUCE_OPS = ("sum", "avg", "product", "min", "max", "band", "bor", "bxor", "premul_sum", "unused")
"""``c10d::ReduceOp::RedOpType`` in the order of torch/csrc/distributed/c10d/Types.hpp."""


class Call:
    """A c10d operator call.

    ``inputs`` and ``outputs`` are flat lists of tensors (the same list for in-place operators).
    ``peer`` is the root, source or destination as a group rank, ``NO_PEER`` without one.
    ``informative`` says whether this rank's inputs carry information (a broadcast's do only on
    its root). ``boxed_outputs`` is the operator's own output argument, to be returned unchanged.
    """

    __slots__ = (
        "boxed_outputs",
        "device",
        "in_split_sizes",
        "informative",
        "inputs",
        "is_async",
        "operator",
        "out_split_sizes",
        "outputs",
        "peer",
        "pg",
        "reduce_op",
        "tag",
    )

    def __init__(self, operator: Operator, args: Sequence[Any]) -> None:
        values = operator.arguments(args)
        self.operator = operator
        self.pg: ProcessGroup = ProcessGroup.unbox(values["process_group"])
        self.boxed_outputs: Any = values[operator.outputs] if operator.outputs else None
        self.outputs: list[torch.Tensor] = _flat(self.boxed_outputs)
        self.inputs: list[torch.Tensor] = (
            self.outputs if operator.in_place else _flat(values[operator.inputs]) if operator.inputs else []
        )
        self.peer: int = values[operator.peer] if operator.peer else NO_PEER
        reduce_op = values.get("reduce_op")
        self.reduce_op: str = "" if reduce_op is None else _REDUCE_OPS[reduce_op.op()]
        self.tag: int = values.get("tag", 0)
        self.in_split_sizes: tuple[int, ...] = tuple(values.get("input_split_sizes", ()))
        self.out_split_sizes: tuple[int, ...] = tuple(values.get("output_split_sizes", ()))
        # send, recv and monitored_barrier have no such argument: p2p handles are always waited for
        # separately, a monitored barrier has no handle at all
        self.is_async: bool = values.get("async_op", operator.kind is not Kind.SYNC)
        tensors = self.inputs or self.outputs
        self.device: torch.device = tensors[0].device if tensors else _any_device(values)
        self.informative: bool = bool(self.inputs) and (
            not operator.root_sends or self.pg.rank() == self.peer
        )


class Handler(Protocol):
    """What stands in place of the c10d kernels: the recorder or the replayer."""

    def handle(self, call: Call, proceed: Proceed) -> Work | None:
        """Answer ``call``; ``proceed`` runs the original kernel. The Work returned must stay valid
        when nobody in Python holds it."""
        ...

    def on_wait(self, work: Work, wait: Callable[[], bool]) -> bool:
        """The program waits for ``work``; ``wait`` is the original wait.

        A Work made from a future does not raise that future's error: the handler does.
        """
        ...

    def start_batch(self, pg: ProcessGroup) -> None:
        """A coalescing batch begins on ``pg``."""
        ...

    def end_batch(self, pg: ProcessGroup, proceed: Proceed) -> Work | None:
        """The batch on ``pg`` ends; ``proceed`` is the original end, whose Work stands for all."""
        ...


def _flat(value: Any) -> list[torch.Tensor]:
    if value is None:
        return []
    if isinstance(value, torch.Tensor):
        return [value]
    tensors: list[torch.Tensor] = []
    for item in value:
        if isinstance(item, torch.Tensor):
            tensors.append(item)
        else:
            tensors.extend(item)
    return tensors


def _any_device(values: dict[str, Any]) -> torch.device:
    tensor = values.get("tensor")
    return tensor.device if isinstance(tensor, torch.Tensor) else torch.device("cpu")
