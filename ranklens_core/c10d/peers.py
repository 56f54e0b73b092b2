"""What is known of the tensors that peers would send, when nobody recorded them.

Peers are taken to be like this rank: a tensor from one of them looks like what this rank sends of that
shape to the others. An adapter that knows more (shapes that a framework exchanges) says so.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count

import torch
import xxhash

from ranklens_core.c10d.call import Call

NOISE_SCALE = 0.02
"""Standard deviation of received activations nobody knows: the usual initial weight scale of GPTs."""

KEPT_ELEMENTS = 1 << 20
"""The largest sent tensor of whole numbers that is kept for receives of its shape."""

Kind = tuple[str, torch.Size, torch.dtype]
"""Tensors that stand for each other: torch's name of the group, shape, dtype."""


class Peers:
    """Remembers what this rank sends."""

    def __init__(self) -> None:
        self._scales: dict[Kind, dict[int, float]] = {}
        self._whole: dict[Kind, dict[int, torch.Tensor]] = {}
        self._calls: dict[tuple[str, str, int], Iterator[int]] = {}
        self._expected = threading.local()

    @contextmanager
    def sending(self, values: torch.Tensor) -> Iterator[None]:
        """Inside, a peer sends ``values`` (whole numbers), or a tensor that begins with them."""
        previous = getattr(self._expected, "values", None)
        self._expected.values = values
        try:
            yield
        finally:
            self._expected.values = previous

    def draw(self, call: Call) -> int:
        """A number for this call that is the same in every run and another for every call."""
        lane = (call.pg.group_name, call.operator.op, call.peer)
        number = next(self._calls.setdefault(lane, count()))
        return xxhash.xxh64_intdigest(repr((*lane, number)).encode())

    def note_sent(self, call: Call) -> None:
        """Remember a send, before the program goes on."""
        for tensor in call.inputs:
            if tensor.layout is not torch.strided or not tensor.numel():
                continue
            kind = _kind(call, tensor)
            if is_floating(tensor):
                scales = self._scales.setdefault(kind, {})
                if call.peer not in scales:
                    # The first one, not the last: it was made from noise of the default scale. A stage that
                    # amplifies would be fed its own output's scale, more in every micro-batch, up to inf.
                    scale = _rms(tensor)
                    if scale > 0 and math.isfinite(scale):
                        scales[call.peer] = scale
            elif tensor.numel() <= KEPT_ELEMENTS:
                self._whole.setdefault(kind, {})[call.peer] = tensor.detach().clone()

    def scale_of(self, call: Call, tensor: torch.Tensor) -> float:
        """Standard deviation of what ``call`` receives into ``tensor``: that of what this rank first sent
        of this kind to another peer (in a pipeline, the next stage's input looks like this one's)."""
        scales = self._scales.get(_kind(call, tensor), {})
        return next((scale for peer, scale in scales.items() if peer != call.peer), NOISE_SCALE)

    def whole_of(self, call: Call, tensor: torch.Tensor) -> torch.Tensor | None:
        """The whole numbers that ``call`` receives into ``tensor``; None where they cannot be known."""
        expected = self.expected_for(tensor)
        if expected is not None:
            return expected
        sent = self._whole.get(_kind(call, tensor), {})
        others = [values for peer, values in sent.items() if peer != call.peer]
        return next(iter(others or sent.values()), None)

    def expected_for(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """What an adapter says that ``tensor`` receives now, in its shape; None if nobody does."""
        values: torch.Tensor | None = getattr(self._expected, "values", None)
        if values is None or is_floating(tensor) or values.numel() > tensor.numel():
            return None
        whole = torch.zeros(tensor.numel(), dtype=tensor.dtype, device=tensor.device)
        whole[: values.numel()] = values.reshape(-1)
        return whole.view(tensor.shape)


def _kind(call: Call, tensor: torch.Tensor) -> Kind:
    return (call.pg.group_name, tensor.shape, tensor.dtype)


def is_floating(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` holds floating-point numbers, real or complex."""
    return tensor.dtype.is_floating_point or tensor.dtype.is_complex


def _rms(tensor: torch.Tensor) -> float:
    """Root mean square; of a complex tensor, of its magnitude."""
    values = tensor.detach()
    wide = values.abs() if values.dtype.is_complex else values.to(torch.float32)
    return float(torch.linalg.vector_norm(wide)) / math.sqrt(wide.numel())
