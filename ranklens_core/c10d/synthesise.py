"""Results nobody recorded: what uniform peers would have sent. Always initialised and finite for
finite inputs, the same in every run; whoever uses them labels them ``synthesised``.

What this rank would send is what it gets: a sum is its own part times the ranks, a gather copies of it, a
broadcast its own tensor, a message what it sends of that shape. Where it has nothing of its own to go by,
floating-point numbers are noise and integers are zeros.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ranklens_core.c10d.call import Call
from ranklens_core.c10d.noise import Noise
from ranklens_core.c10d.ops import Kind
from ranklens_core.c10d.peers import NOISE_SCALE, Peers, is_floating
from ranklens_core.c10d.unwritten import Unwritten
from ranklens_core.schema import NO_PEER

__all__ = ["NOISE_SCALE", "Synthesiser"]

Write = Callable[[], None]

APART = 40_503
"""How far apart in the noise the tensors of one call begin."""

SANE = 1e30
"""A tensor with larger numbers than this is taken for memory nobody has written to."""

SMALL_NUMEL = 64
"""A sum over so few numbers is more often a count or a flag than a parameter."""

_REDUCES = frozenset({"all_reduce", "all_reduce_coalesced", "reduce"})
_REDUCE_SCATTERS = frozenset({"reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_tensor_coalesced"})
_FROM_ONE = frozenset({"recv", "recv_any_source", "broadcast", "scatter"})


class Synthesiser:
    """Makes up the outputs of calls.

    ``peers`` knows what this rank has sent, ``unwritten`` the program's fresh buffers (None: they are not
    told from others).
    """

    def __init__(
        self, peers: Peers | None = None, unwritten: Unwritten | None = None, *, seed: int = 0
    ) -> None:
        self.peers = peers or Peers()
        self._unwritten = unwritten
        self._noise = Noise(seed)

    def guesses(self, call: Call) -> bool:
        """Whether integers that a peer sends would be made up: sizes, indices, pickled objects."""
        if call.informative or not call.outputs or is_floating(call.outputs[0]):
            return False
        if call.operator.kind is Kind.RECV:
            return any(self.peers.whole_of(call, tensor) is None for tensor in call.outputs)
        return call.operator.root_sends and any(
            self.peers.expected_for(tensor) is None for tensor in call.outputs
        )

    def cannot_know(self, call: Call) -> bool:
        """Whether a guess is certain to be wrong: a message of sizes. (Tokens have two dimensions.)"""
        return (
            call.operator.kind is Kind.RECV
            and self.guesses(call)
            and any(tensor.dim() <= 1 for tensor in call.outputs)
        )

    def fill(self, call: Call, *, set_up: bool = False) -> None:
        """``filling``, at once."""
        self.filling(call, set_up=set_up)()

    def filling(self, call: Call, *, set_up: bool = False) -> Write:
        """What writes into ``call.outputs`` what ``call.pg.size()`` ranks like this one would have made.

        To be asked for when the program makes the call and run when the result arrives: the values do not
        depend on how calls overlap. ``set_up``: the training has not begun. A sum over nothing but zeros is
        then a parameter that this rank gets from another (Megatron's tied embedding), and becomes noise.
        """
        op, outputs = call.operator.op, [tensor.detach() for tensor in call.outputs]
        if op == "send":
            self.peers.note_sent(call)
            return lambda: None
        if op in _FROM_ONE:
            return _all_of(self._from_one(call, outputs))
        if op in _REDUCES:
            draw = self.peers.draw(call) if set_up else None
            return _all_of([self._reducing(call, tensor, draw) for tensor in outputs])
        inputs = [tensor.detach() for tensor in call.inputs]
        if op in _REDUCE_SCATTERS:
            size, rank, reduce_op = call.pg.size(), call.pg.rank(), call.reduce_op
            return _all_of([lambda: _reduce_scatter(inputs, outputs, reduce_op, size, rank)])
        if op == "all_to_all":
            return _all_of([_tiling(*pair) for pair in zip(outputs, inputs, strict=True)])
        # gathers: every peer contributes what this rank does, all its tensors before the next peer's;
        # all_to_all_single: what this rank sends, cut by what it receives
        pairs = [(tensor, inputs[index % len(inputs)]) for index, tensor in enumerate(outputs)]
        return _all_of([_tiling(*pair) for pair in pairs if not _holds_all_parts(*pair)])

    def _reducing(self, call: Call, tensor: torch.Tensor, draw: int | None) -> Write:
        """``draw`` is None once the training has begun."""
        size, reduce_op = call.pg.size(), call.reduce_op

        def write() -> None:
            if draw is not None and is_floating(tensor) and tensor.numel() > SMALL_NUMEL and not tensor.any():
                self._noise.fill(tensor, draw, NOISE_SCALE)
            _reduce(tensor, tensor, reduce_op, size)

        return write

    def _from_one(self, call: Call, outputs: list[torch.Tensor]) -> list[Write]:
        """What one rank decides: this one, if it is the root of a broadcast or scatter, or another."""
        op, draw = call.operator.op, self.peers.draw(call)
        if op in ("broadcast", "scatter") and call.peer in (NO_PEER, call.pg.rank()):
            return [_copying(outputs[0], call.inputs[call.pg.rank()].detach())] if op == "scatter" else []
        found = [self._one(call, tensor, draw + index * APART) for index, tensor in enumerate(outputs)]
        return [write for write in found if write is not None]

    def _one(self, call: Call, tensor: torch.Tensor, draw: int) -> Write | None:
        """None where ``tensor`` keeps what it holds."""
        op = call.operator.op
        if not is_floating(tensor):
            expected = self.peers.expected_for(tensor)
            if expected is None and op == "broadcast":
                return None
            whole = self.peers.whole_of(call, tensor) if op != "scatter" else expected
            return _copying(tensor, whole) if whole is not None else lambda: _zero(tensor)
        if op == "broadcast":
            # parameters: uniform peers hold the same. A fresh buffer gets positive numbers: it may be a mask
            # that the loss is divided by
            fresh = self._unwritten is not None and self._unwritten.holds(tensor)
            if not fresh and _is_sane(tensor):
                return None
            return lambda: self._noise.fill(tensor, draw, NOISE_SCALE, positive=True)
        scale = self.peers.scale_of(call, tensor) if op == "recv" else NOISE_SCALE
        return lambda: self._noise.fill(tensor, draw, scale)


def _all_of(writes: list[Write]) -> Write:
    def write() -> None:
        with torch.no_grad():
            for one in writes:
                one()

    return write


def _copying(tensor: torch.Tensor, values: torch.Tensor) -> Write:
    def write() -> None:
        tensor.copy_(values)

    return write


def _tiling(out: torch.Tensor, source: torch.Tensor) -> Write:
    return lambda: _tile(out, source)


def _zero(tensor: torch.Tensor) -> None:
    tensor.zero_()


def _holds_all_parts(whole: torch.Tensor, own: torch.Tensor) -> bool:
    """Whether an own part is gathered in place into a whole that has the others' parts from before: sharded
    optimizers do that with parameters. Copies of the own part would make all layers alike in one step."""
    begin, inside = own.data_ptr() - whole.data_ptr(), whole.nbytes - own.nbytes
    return (
        own.numel() < whole.numel()
        and 0 <= begin <= inside
        and int(whole.count_nonzero()) > int(own.count_nonzero())
    )


def _is_sane(tensor: torch.Tensor) -> bool:
    return tensor.numel() == 0 or bool(tensor.abs().max() <= SANE)


def _reduce_scatter(
    inputs: list[torch.Tensor], outputs: list[torch.Tensor], reduce_op: str, size: int, rank: int
) -> None:
    per_output = len(inputs) // len(outputs)
    for index, tensor in enumerate(outputs):
        if per_output > 1:
            own = inputs[index * per_output + rank]
        else:
            own = inputs[index].reshape(-1).chunk(size)[rank].view_as(tensor)
        _reduce(tensor, own, reduce_op, size)


def _reduce(out: torch.Tensor, own: torch.Tensor, reduce_op: str, size: int) -> None:
    """Of equal values avg, min, max, band and bor are the value itself; so is premul_sum where it averages,
    as its users do (its factor cannot be read)."""
    if out is not own:
        out.copy_(own)
    if reduce_op == "bxor" and size % 2 == 0:
        out.zero_()
    if reduce_op not in ("sum", "product") or out.dtype is torch.bool:
        return  # of truth values NCCL and gloo make the sum an or, the product an and
    wide = out.to(torch.float32) if out.dtype.is_floating_point and out.element_size() == 1 else out
    if reduce_op == "sum":
        wide.mul_(size)
    else:
        wide.copy_(wide.clone().pow_(size))
    if wide is not out:
        out.copy_(wide)


def _tile(out: torch.Tensor, source: torch.Tensor) -> None:
    """Fill ``out`` with copies of ``source``, the last one cut where it does not fit."""
    if out.numel() == 0:
        return
    flat = source.reshape(-1)
    if flat.numel() == 0:
        out.zero_()
        return
    copies, rest = divmod(out.numel(), flat.numel())
    if flat.untyped_storage()._cdata == out.untyped_storage()._cdata:
        flat = flat.clone()  # a rank's own part may lie in the gathered whole
    if not rest and out.is_contiguous():
        out.view(copies, flat.numel()).copy_(flat)
    else:
        out.copy_(flat.repeat(copies + bool(rest))[: out.numel()].view(out.shape))
