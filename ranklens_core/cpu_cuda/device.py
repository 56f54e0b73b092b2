"""What ``torch.cuda`` tells about the device: the CPU, in the words of a GPU."""

from __future__ import annotations

import os
import resource
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from .naming import DEVICE, names_cuda

# Ampere: bfloat16 and TF32 exist, fp8 and the Hopper and Blackwell paths of the frameworks do not.
_CAPABILITY = (8, 0)
_NAME = "CPU (RankLens stand-in for CUDA)"
_STATM = Path("/proc/self/statm")


def _page_bytes(pages: str) -> int:
    return os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE")


def _rusage_peak_bytes() -> int:
    unit = 1 if sys.platform == "darwin" else 1024  # getrusage(2): bytes on macOS, KiB elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _memory_bytes(device: object = None) -> int:
    """Resident memory of the process, code and libraries too; the peak where the system tells no more."""
    if not _STATM.exists():
        return _rusage_peak_bytes()
    return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _peak_memory_bytes(device: object = None) -> int:
    """Peak resident memory of the process since it started, which no reset lowers."""
    # The kernel brings its peak up to date only now and then.
    return max(_rusage_peak_bytes(), _memory_bytes())


def _memory_stats(device: object = None) -> Counter[str]:
    """The figures that have a meaning on the CPU; a Counter, so that all others are 0, not a KeyError."""
    now, peak = _memory_bytes(), _peak_memory_bytes()
    stats = Counter[str]()
    for pool in ("allocated_bytes", "reserved_bytes", "active_bytes"):
        stats[f"{pool}.all.current"] = now
        stats[f"{pool}.all.peak"] = peak
    return stats


def _mem_get_info(device: object = None) -> tuple[int, int]:
    """Free and total physical memory of the machine, in bytes."""
    return _page_bytes("SC_AVPHYS_PAGES"), _page_bytes("SC_PHYS_PAGES")


def _properties(device: object = None) -> SimpleNamespace:
    major, minor = _CAPABILITY
    return SimpleNamespace(
        name=_NAME,
        major=major,
        minor=minor,
        total_memory=_page_bytes("SC_PHYS_PAGES"),
        multi_processor_count=os.cpu_count() or 1,
        warp_size=32,
        max_threads_per_multi_processor=2048,
        is_integrated=True,
        is_multi_gpu_board=False,
    )


class CurrentDevice:
    """The device index a program chose with ``torch.cuda.set_device``, and the functions about it.

    ``mode_is_active`` tells whether a bare index would be understood where the caller stands.
    """

    def __init__(self, mode_is_active: Callable[[], bool]) -> None:
        self._index = 0
        self._mode_is_active = mode_is_active

    def device_count(self) -> int:
        """One device for each rank of this host, as the launcher's LOCAL_WORLD_SIZE says."""
        return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))

    def current_device(self) -> int | torch.device:
        """The index, as with CUDA; where torch would take it past the stand-in, the CPU itself.

        That is a thread from before `install`, and code under ``torch._C.DisableTorchFunction``.
        """
        return self._index if self._mode_is_active() else DEVICE

    def index_of(self, device: Any, optional: bool = False, allow_cpu: bool = False) -> int:
        """``torch.cuda._utils._get_device_index``, for which a tensor's device is the CPU here."""
        if isinstance(device, int):
            return device
        if isinstance(device, torch.cuda.device):
            return int(device.idx)
        named = torch.device(device) if isinstance(device, str) else device
        if named is None or (isinstance(named, torch.device) and (names_cuda(named) or named.type == "cpu")):
            return self._index if named is None or named.index is None else int(named.index)
        raise ValueError(f"Expected a cuda device, but got: {device}")

    def set_device(self, device: object) -> None:
        index = self.index_of(device)
        if index >= 0:
            self._index = index

    def exchange(self, index: int) -> int:
        """Choose ``index`` if it is one, and return the index so far."""
        previous = self._index
        self.set_device(index)
        return previous

    def replacements(self) -> dict[str, object]:
        """Stand-ins by their name in ``torch.cuda``; its ``device`` and ``device_of`` build on these."""
        return {
            # torch then takes no lazy path: seeds and states are set at once
            "_initialized": True,
            "_get_device_index": self.index_of,
            "_exchange_device": self.exchange,
            "_maybe_exchange_device": self.exchange,
            "is_available": lambda: True,
            "is_bf16_supported": lambda including_emulation=True: True,
            "is_tf32_supported": lambda: True,
            "device_count": self.device_count,
            "current_device": self.current_device,
            "set_device": self.set_device,
            "can_device_access_peer": lambda device, peer_device: True,
            "get_device_name": lambda device=None: _NAME,
            "get_device_capability": lambda device=None: _CAPABILITY,
            "get_device_properties": _properties,
            "get_arch_list": list,
        }


def memory_replacements() -> dict[str, object]:
    """Stand-ins for the memory functions of ``torch.cuda``, by name."""

    def nothing(device: object = None) -> None:
        """Nothing is cached, and a peak of the operating system cannot be reset."""

    return {
        "memory_allocated": _memory_bytes,
        "memory_reserved": _memory_bytes,
        "memory_cached": _memory_bytes,
        "device_memory_used": _memory_bytes,
        "max_memory_allocated": _peak_memory_bytes,
        "max_memory_reserved": _peak_memory_bytes,
        "max_memory_cached": _peak_memory_bytes,
        "memory_stats": _memory_stats,
        "mem_get_info": _mem_get_info,
        "empty_cache": lambda: None,
        "ipc_collect": lambda: None,
        "reset_peak_memory_stats": nothing,
        "reset_accumulated_memory_stats": nothing,
        "reset_max_memory_allocated": nothing,
        "reset_max_memory_cached": nothing,
        "set_per_process_memory_fraction": lambda fraction, device=None: None,
    }
