"""Which side of the stand-in a tensor is on: the host, or the "device".

Both are the same memory here, but a program sees the difference: `.cuda()` and `.cpu()` copy, and a random
fill draws from the generator of the tensor's own side. A tensor is on the host when it was created without
naming a CUDA device (`torch.empty(2)`), or moved there (`.cpu()`); views share the answer, for it is kept
with the storage. Everything else, results of operators above all, is on the device: in a CUDA program, that
is where computing happens.
"""

from __future__ import annotations

import torch

from ranklens_core.patches import Patches

from .naming import DEVICE

# On the storage, which torch keeps one Python object for as long as the storage lives.
_HOST_MARK = "_ranklens_on_host"


def _has_plain_storage(value: object) -> bool:
    return type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout is torch.strided  # type: ignore[attr-defined]


def mark_host(value: object) -> None:
    """Note that a tensor is on the host. Other objects, and tensors without a storage, are left alone."""
    if _has_plain_storage(value):
        setattr(value.untyped_storage(), _HOST_MARK, True)  # type: ignore[attr-defined]


def is_host(value: object) -> bool:
    """Whether ``value`` is a tensor on the host."""
    return _has_plain_storage(value) and getattr(value.untyped_storage(), _HOST_MARK, False)  # type: ignore[attr-defined]


def moved(source: torch.Tensor, result: torch.Tensor, *, to_device: bool) -> torch.Tensor:
    """``result``, what torch made of moving ``source`` to the CPU, as CUDA would have returned it.

    Moving to the other side gives a copy there; moving to the own side gives the tensor itself.
    """
    if result is source and is_host(source) == to_device:
        result = source.clone()
    if not to_device:
        mark_host(result)
    return result


def install(patches: Patches) -> None:
    """Let ``Tensor.device`` and ``Tensor.is_cuda`` tell the side, in every thread and context alike."""
    device = torch._C.TensorBase.device

    def device_of(tensor: torch.Tensor) -> torch.device:
        with torch._C.DisableTorchFunction():  # programs ask often, and each step would go through the mode
            real: torch.device = device.__get__(tensor)
            return DEVICE if real.type == "cpu" and not is_host(tensor) else real

    def on_device(tensor: torch.Tensor) -> bool:
        return device_of(tensor) == DEVICE

    patches.set(torch.Tensor, "device", property(device_of))
    patches.set(torch.Tensor, "is_cuda", property(on_device))
