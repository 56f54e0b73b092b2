"""One c10d call, decoded: what a handler is given."""

from __future__ import annotations

from collections.abc import Callable
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
        "device_type",
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

    def __init__(self, operator: Operator, args: tuple[Any, ...]) -> None:
        at, values = operator.at, operator.values(args)
        self.operator = operator
        self.pg: ProcessGroup = ProcessGroup.unbox(values[at.process_group])
        self.boxed_outputs: Any = values[at.outputs]
        self.outputs: list[torch.Tensor] = _flat(self.boxed_outputs)
        self.inputs: list[torch.Tensor] = self.outputs if operator.in_place else _flat(values[at.inputs])
        # a method looked up as an attribute costs a third more, and this is most of a call's decoding
        peer, reduce_op, is_async = values[at.peer], values[at.reduce_op], values[at.async_op]
        self.peer: int = NO_PEER if peer is None else peer
        self.reduce_op: str = "" if reduce_op is None else _REDUCE_OPS[reduce_op._get_method("op")()]
        self.tag: int = values[at.tag] or 0
        self.in_split_sizes: tuple[int, ...] = tuple(values[at.in_split_sizes] or ())
        self.out_split_sizes: tuple[int, ...] = tuple(values[at.out_split_sizes] or ())
        # send, recv and monitored_barrier have no such argument: p2p handles are always waited for
        # separately, a monitored barrier has no handle at all
        self.is_async: bool = operator.kind is not Kind.SYNC if is_async is None else is_async
        tensors = self.inputs or self.outputs
        self.device: torch.device = tensors[0].device if tensors else _device(values[at.device_tensor])
        self.device_type: str = _DEVICE_TYPES.get(self.device) or _device_type(self.device)
        self.informative: bool = bool(self.inputs) and (
            not operator.root_sends or self.pg.rank() == self.peer
        )

    @property
    def result(self) -> list[torch.Tensor] | list[list[torch.Tensor]]:
        """What the future of the call holds when it is complete: the outputs, in a list for each rank
        where there are several of each (coalesced all-gather)."""
        nested = isinstance(self.boxed_outputs, list) and len(self.boxed_outputs) > 1
        return self.boxed_outputs if nested else self.outputs


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

    def on_wait_tensor(self, tensor: torch.Tensor, wait: Callable[[], torch.Tensor]) -> torch.Tensor:
        """The program waits for the functional collective that makes ``tensor``; ``wait`` is torch's.

        torch waits for the Work in C++ there, past ``on_wait``: its error is the handler's to raise.
        """
        ...

    def start_batch(self, pg: ProcessGroup) -> None:
        """A coalescing batch begins on ``pg``."""
        ...

    def end_batch(self, pg: ProcessGroup, proceed: Proceed) -> Work | None:
        """The batch on ``pg`` ends; ``proceed`` is the original end, whose Work stands for all."""
        ...


def _flat(value: Any) -> list[torch.Tensor]:
    """The tensors of an argument: one, a list, or a list of lists of them."""
    if value is None:
        return []
    if isinstance(value, torch.Tensor):
        return [value]
    if value and isinstance(value[0], torch.Tensor):
        return list(value)
    return [tensor for tensors in value for tensor in tensors]


_DEVICE_TYPES: dict[torch.device, str] = {}
"""``torch.device.type`` makes a new string each time it is asked."""


def _device_type(device: torch.device) -> str:
    return _DEVICE_TYPES.setdefault(device, device.type)


def _device(tensor: torch.Tensor | None) -> torch.device:
    return torch.device("cpu") if tensor is None else tensor.device
