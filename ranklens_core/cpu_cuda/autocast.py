"""``torch.autocast("cuda")`` as autocast of the CPU.

The dtype is CUDA's (float16 unless said otherwise). Which operators run in it is the CPU's list, which
differs from CUDA's in a few.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.amp.autocast_mode

from ranklens_core.patches import Patches

from .naming import names_cuda


def install(patches: Patches) -> None:
    """Send every question and wish about CUDA's autocast to the CPU's."""
    is_enabled = torch.is_autocast_enabled
    get_dtype = torch.get_autocast_dtype
    autocast = torch.amp.autocast_mode.autocast
    autocast_init = autocast.__init__
    cast = torch.amp.autocast_mode._cast

    def is_autocast_enabled(device_type: str = "cuda") -> bool:
        return is_enabled("cpu" if names_cuda(device_type) else device_type)

    def get_autocast_dtype(device_type: str) -> torch.dtype:
        return get_dtype("cpu" if names_cuda(device_type) and is_enabled("cpu") else device_type)

    def init(self: Any, device_type: str, dtype: Any = None, *args: Any, **kwargs: Any) -> None:
        if names_cuda(device_type):
            device_type, dtype = "cpu", dtype or get_autocast_dtype("cuda")
        autocast_init(self, device_type, dtype, *args, **kwargs)

    def cast_arguments(value: Any, device_type: str, dtype: torch.dtype) -> Any:
        return cast(value, "cpu" if names_cuda(device_type) else device_type, dtype)

    patches.set(torch, "is_autocast_enabled", is_autocast_enabled)
    patches.set(torch, "get_autocast_dtype", get_autocast_dtype)
    patches.set(torch, "get_autocast_gpu_dtype", lambda: get_autocast_dtype("cuda"))
    patches.set(autocast, "__init__", init)
    patches.set(torch.amp.autocast_mode, "_cast", cast_arguments)
