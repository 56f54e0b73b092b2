"""Results nobody recorded: what uniform peers would have sent. Always initialised and finite for
finite inputs, the same in every run; whoever uses them labels them ``synthesised``.
"""

from __future__ import annotations

import torch

from ranklens_core.c10d.call import Call
from ranklens_core.schema import NO_PEER

NOISE_SCALE = 0.02
"""Standard deviation of received activations nobody knows: the usual initial weight scale of GPTs."""

_MULTIPLE = frozenset({"sum", "premul_sum"})


class Synthesiser:
    """Fills the outputs of calls; the noise depends only on how many tensors were made up before."""

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed
        self._made = 0

    @torch.no_grad()
    def fill(self, call: Call) -> None:
        """Write into ``call.outputs`` what ``call.pg.size()`` ranks like this one would have made."""
        outputs = [tensor.detach() for tensor in call.outputs]
        inputs = [tensor.detach() for tensor in call.inputs]
        op, size = call.operator.op, call.pg.size()
        if op in ("all_reduce", "all_reduce_coalesced", "reduce"):
            for tensor in outputs:
                _reduce(tensor, tensor, call.reduce_op, size)
        elif op in ("reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_tensor_coalesced"):
            self._reduce_scatter(call, inputs, outputs)
        elif op in ("broadcast", "scatter"):
            self._from_root(call, inputs, outputs)
        elif op in ("recv", "recv_any_source"):
            for tensor in outputs:
                self._noise(tensor)
        elif op in ("all_to_all", "all_to_all_single"):
            self._all_to_all(call, inputs, outputs)
        else:
            # gathers: every peer contributes what this rank does, all its tensors before the next peer's
            for index, tensor in enumerate(outputs):
                _tile(tensor, inputs[index % len(inputs)])

    def _reduce_scatter(self, call: Call, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
        size, rank = call.pg.size(), call.pg.rank()
        per_output = len(inputs) // len(outputs)
        for index, tensor in enumerate(outputs):
            if per_output > 1:
                own = inputs[index * per_output + rank]
            else:
                own = inputs[index].reshape(-1).chunk(size)[rank].view_as(tensor)
            _reduce(tensor, own, call.reduce_op, size)

    def _from_root(self, call: Call, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
        is_root = call.peer in (NO_PEER, call.pg.rank())
        for tensor in outputs:
            if not is_root:
                self._noise(tensor)
            elif call.operator.op == "scatter":
                tensor.copy_(inputs[call.pg.rank()])

    def _all_to_all(self, call: Call, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
        if call.operator.op == "all_to_all":
            for tensor, source in zip(outputs, inputs, strict=True):
                _tile(tensor, source)
        else:
            _tile(outputs[0], inputs[0])

    def _noise(self, tensor: torch.Tensor) -> None:
        self._made += 1
        generator = torch.Generator(device="cpu").manual_seed(self._seed * 1_000_003 + self._made)
        if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
            noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float32)
            tensor.copy_(noise.mul_(NOISE_SCALE))
        else:
            # an integer is more often a count or an index than data: zero is valid as any of these
            tensor.zero_()


def _reduce(out: torch.Tensor, own: torch.Tensor, reduce_op: str, size: int) -> None:
    if out is not own:
        out.copy_(own)
    if reduce_op in _MULTIPLE:
        out.mul_(size)
    elif reduce_op == "product":
        out.copy_(own.clone().pow_(size))
    elif reduce_op == "bxor" and size % 2 == 0:
        out.zero_()


def _tile(out: torch.Tensor, source: torch.Tensor) -> None:
    """Fill ``out`` with copies of ``source``, the last one cut where it does not fit."""
    if out.numel() == 0:
        return
    flat = source.reshape(-1)
    if flat.numel() == 0:
        out.zero_()
        return
    copies = -(-out.numel() // flat.numel())
    out.copy_(flat.repeat(copies)[: out.numel()].view(out.shape).to(out.dtype))
