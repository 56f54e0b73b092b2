"""Telling whether a value names the stand-in's device or the host.

A tensor that a GPU would hold says that it is on ``cpu:0``, one on the host says ``cpu``: to torch the same
place, to ``torch.zeros(..., device=x.device)`` the side of ``x``.
"""

from __future__ import annotations

import torch

DEVICE = torch.device("cpu", 0)
"""The stand-in's device, in a form that every function of torch understands."""


def names_cuda(device: object) -> bool:
    """Whether ``device`` is what torch reads as CUDA: ``"cuda:1"``, ``torch.device("cuda")``, ``1``."""
    if isinstance(device, torch.device):
        return device.type == "cuda"
    if isinstance(device, str):
        return device == "cuda" or device.startswith("cuda:")
    return isinstance(device, int) and not isinstance(device, bool)


def names_device(device: object) -> bool:
    """Whether ``device`` is a CUDA device, or the `DEVICE` that stands for it."""
    return names_cuda(device) or device == DEVICE


def names_host(device: object) -> bool:
    """Whether ``device`` is the CPU beside the device."""
    return device == "cpu" or device == torch.device("cpu")
