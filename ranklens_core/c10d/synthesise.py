"""Results nobody recorded: what uniform peers would have sent. Always initialised and finite for
finite inputs, the same in every run; whoever uses them labels them ``synthesised``.

What this rank would send is what it gets: a sum is its own part times the ranks, a gather copies of it, a
broadcast its own tensor. Where it has nothing of its own to go by, floating-point numbers are noise and
integers are zeros, or what it sent itself.
"""

from __future__ import annotations

import torch

from ranklens_core.c10d.call import Call
from ranklens_core.c10d.ops import Kind
from ranklens_core.schema import NO_PEER

NOISE_SCALE = 0.02
"""Standard deviation of received activations nobody knows: the usual initial weight scale of GPTs."""

SANE = 1e4
"""A tensor with larger numbers than this (or none at all) is taken for memory nobody has written to."""

SMALL_NUMEL = 64
"""Integers in tensors up to this are more often sizes and flags than data."""

_MULTIPLE = frozenset({"sum", "premul_sum"})


class Synthesiser:
    """Fills the outputs of calls; the noise depends only on how many tensors were made up before."""

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed
        self._made = 0
        self._sent_std: dict[torch.Size, torch.Tensor] = {}
        self._sent_integers: dict[tuple[torch.Size, torch.dtype], torch.Tensor] = {}

    def guesses(self, call: Call) -> bool:
        """Whether integers that a peer sends would be made up: sizes, indices, pickled objects."""
        if call.informative or not call.outputs or _floats(call.outputs[0]):
            return False
        if call.operator.kind is Kind.RECV:
            return any((t.shape, t.dtype) not in self._sent_integers for t in call.outputs)
        return call.operator.root_sends

    @torch.no_grad()
    def fill(self, call: Call, *, set_up: bool = False) -> None:
        """Write into ``call.outputs`` what ``call.pg.size()`` ranks like this one would have made.

        ``set_up``: the training has not begun. A sum over nothing but zeros is then a parameter that this
        rank gets from another (Megatron's tied embedding), and becomes noise.
        """
        outputs = [tensor.detach() for tensor in call.outputs]
        inputs = [tensor.detach() for tensor in call.inputs]
        op, size = call.operator.op, call.pg.size()
        if op in ("all_reduce", "all_reduce_coalesced", "reduce"):
            for tensor in outputs:
                if set_up and _floats(tensor) and tensor.numel() > SMALL_NUMEL and not tensor.any():
                    self._noise(tensor)
                _reduce(tensor, tensor, call.reduce_op, size)
        elif op in ("reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_tensor_coalesced"):
            self._reduce_scatter(call, inputs, outputs)
        elif op in ("broadcast", "scatter"):
            self._from_root(call, inputs, outputs)
        elif op in ("recv", "recv_any_source"):
            for tensor in outputs:
                self._received(tensor)
        elif op == "send":
            for tensor in inputs:
                self._remember(tensor)
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
            if is_root:
                if call.operator.op == "scatter":
                    tensor.copy_(inputs[call.pg.rank()])
            elif call.operator.op == "scatter" or not _is_own(tensor):
                self._noise(tensor)

    def _all_to_all(self, call: Call, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
        if call.operator.op == "all_to_all":
            for tensor, source in zip(outputs, inputs, strict=True):
                _tile(tensor, source)
        else:
            _tile(outputs[0], inputs[0])

    def _remember(self, tensor: torch.Tensor) -> None:
        """A message of this rank's tells what those to it look like."""
        if _floats(tensor):
            self._sent_std[tensor.shape] = tensor.float().pow(2).mean().sqrt()
        elif tensor.numel() <= SMALL_NUMEL:
            self._sent_integers[tensor.shape, tensor.dtype] = tensor.clone()

    def _received(self, tensor: torch.Tensor) -> None:
        known = self._sent_integers.get((tensor.shape, tensor.dtype))
        if known is not None:
            tensor.copy_(known)
        else:
            self._noise(tensor, self._sent_std.get(tensor.shape))

    def _noise(self, tensor: torch.Tensor, scale: torch.Tensor | None = None) -> None:
        self._made += 1
        generator = torch.Generator(device="cpu").manual_seed(self._seed * 1_000_003 + self._made)
        if _floats(tensor):
            noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float32)
            tensor.copy_(noise.mul_(NOISE_SCALE) if scale is None else noise.to(scale.device).mul_(scale))
        else:
            # an integer is more often a count or an index than data: zero is valid as any of these
            tensor.zero_()


def _floats(tensor: torch.Tensor) -> bool:
    return tensor.dtype.is_floating_point or tensor.dtype.is_complex


def _is_own(tensor: torch.Tensor) -> bool:
    """Whether a tensor that another rank is to fill already holds what this rank would send.

    Parameters before they are broadcast do; a buffer from ``torch.empty`` holds anything.
    """
    if not _floats(tensor):
        return tensor.numel() <= SMALL_NUMEL
    if tensor.numel() == 0:
        return True
    return bool(tensor.abs().max() <= SANE) and bool(tensor.any())


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
