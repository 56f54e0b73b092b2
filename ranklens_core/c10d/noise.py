"""Noise at the speed of a copy: a received tensor may be large, and arrives on time."""

from __future__ import annotations

import torch

POOL_ELEMENTS = 1 << 20


class Noise:
    """Standard normal numbers, drawn once with ``seed``; every request begins at another place of them."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._pools: dict[torch.device, torch.Tensor] = {}

    def fill(self, tensor: torch.Tensor, draw: int, scale: float, *, positive: bool = False) -> None:
        """Write noise of standard deviation ``scale`` (its magnitudes if ``positive``); ``draw`` says where
        it begins."""
        pool = self._pool(tensor.device)
        direct = tensor.is_contiguous() and tensor.dtype is torch.float32
        flat = tensor.view(-1) if direct else torch.empty(tensor.numel(), device=tensor.device)
        at, begin = 0, draw % POOL_ELEMENTS
        while at < flat.numel():
            part = pool[begin : begin + flat.numel() - at]
            torch.mul(part, scale, out=flat[at : at + part.numel()])
            at, begin = at + part.numel(), 0
        if positive:
            flat.abs_()
        if not direct:
            tensor.copy_(flat.view(tensor.shape))

    def _pool(self, device: torch.device) -> torch.Tensor:
        pool = self._pools.get(device)
        if pool is None:
            generator = torch.Generator(device="cpu").manual_seed(self._seed)
            drawn = torch.randn(POOL_ELEMENTS, generator=generator, dtype=torch.float32, device="cpu")
            pool = self._pools[device] = drawn.to(device)
        return pool
