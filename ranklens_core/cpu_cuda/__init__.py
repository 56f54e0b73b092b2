"""The CPU stand-in for CUDA: an unmodified CUDA-only program trains on a machine without a GPU.

`install` gives ``torch.cuda`` a device that is the CPU, `remove` leaves torch exactly as it was. Install
before the program runs; frameworks may have been imported before or after. What differs from a GPU:

* ``Tensor.is_cuda`` is true of what a GPU would hold (see `residence`), but its ``device`` says ``cpu:0``.
* Random numbers are a CPU generator's (see `random`); CPU and device streams are apart, as with CUDA.
* Memory figures are the process's resident memory and the machine's physical memory.
* ``torch.compile`` leaves functions as they are: compiled code would pass by the stand-in. Those decorated
  meanwhile stay so after `remove`.
* CUDA graphs and memory pools raise `UsageError`.
* Inside ``torch.jit.script``, in threads started before `install`, and under
  ``torch._C.DisableTorchFunction``, ``device="cuda"`` is torch's own error, never a silent change.

Never install it for a DeepSpeed program: DeepSpeed has its own CPU accelerator and would take the stand-in
for a GPU. The caller decides; nothing here looks at the program.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.cuda.nvtx
import torch.cuda.profiler
import torch.utils.checkpoint

from ranklens_core.errors import UsageError
from ranklens_core.patches import Patches

from . import autocast, residence, streams, tools
from .device import CurrentDevice, memory_replacements
from .mode import CudaOnCpu
from .naming import names_cuda
from .random import DeviceRandom, Generator
from .residence import mark_host

__all__ = ["cpu_cuda", "install", "is_installed", "remove"]

_installed: Patches | None = None
_installing_thread: int | None = None

_TENSOR_TYPES = [
    f"{dtype}Tensor"
    for dtype in ("BFloat16", "Bool", "Byte", "Char", "Double", "Float", "Half", "Int", "Long", "Short")
]


def is_installed() -> bool:
    """Whether the stand-in is in place."""
    return _installed is not None


def install() -> None:
    """Put the stand-in in place, for this thread and those it starts. Does nothing if it is.

    Raises:
        UsageError: there is a CUDA device, which the program should use.
    """
    global _installed, _installing_thread
    if _installed is not None:
        return
    if torch.cuda.is_available():
        raise UsageError(
            "The CPU stand-in for CUDA is for machines without a GPU, and torch sees "
            f"{torch.cuda.device_count()} here. Run without --cpu, or hide the GPUs with "
            "CUDA_VISIBLE_DEVICES= (empty)."
        )
    patches = Patches()
    try:
        _install(patches)
    except BaseException:
        patches.undo()
        raise
    _installed, _installing_thread = patches, threading.get_ident()


def remove() -> None:
    """Take the stand-in away; torch is as it was. Does nothing if it is not in place.

    Raises:
        UsageError: called in another thread than `install`.
    """
    global _installed
    if _installed is None:
        return
    if threading.get_ident() != _installing_thread:
        raise UsageError(
            "cpu_cuda.remove() was called in another thread than cpu_cuda.install(). The stand-in belongs to "
            "that thread: call remove() there."
        )
    patches, _installed = _installed, None
    patches.undo()


@contextmanager
def cpu_cuda() -> Iterator[None]:
    """The stand-in within a block. A block inside another, or after `install`, changes nothing.

    Raises:
        UsageError: as `install` and `remove`.
    """
    outermost = not is_installed()
    install()
    try:
        yield
    finally:
        if outermost:
            remove()


def _install(patches: Patches) -> None:
    device = CurrentDevice(mode_is_active=lambda: mode.is_active())
    random = DeviceRandom(device.device_count)
    mode = CudaOnCpu(random)

    _replace_in_cuda(patches, device.replacements())
    _replace_in_cuda(patches, memory_replacements())
    _replace_in_cuda(patches, random.replacements())
    _replace_in_cuda(patches, streams.replacements())
    _replace_in_cuda(patches, tools.replacements())
    for name in _TENSOR_TYPES:
        patches.set(torch.cuda, name, getattr(torch, name))
    patches.set(torch.cuda.nvtx, "_nvtx", tools.Ranges())
    patches.set(torch.cuda.profiler, "start", lambda: None)
    patches.set(torch.cuda.profiler, "stop", lambda: None)
    patches.set(torch._C, "_cuda_attach_out_of_memory_observer", lambda observer: None)

    # The caching allocator's affair. torch parses the stream before it asks a function mode.
    patches.set(torch.Tensor, "record_stream", lambda tensor, stream: None)

    for name, value in random.checkpoint_replacements().items():
        patches.set(torch.utils.checkpoint, name, value)
    patches.set(torch.utils.checkpoint.DefaultDeviceType, "_default_device_type", "cuda")
    patches.set(torch, "Generator", Generator)
    autocast.install(patches)
    residence.install(patches)
    _load_to_cpu(patches)
    _keep_foreign_memory_on_host(patches)
    _move_modules_to_an_index(patches)
    _switch_dynamo_off(patches)
    mode.activate(patches)


def _replace_in_cuda(patches: Patches, replacements: Mapping[str, object]) -> None:
    """Set each name in ``torch.cuda`` and in every module of it that has the same object under that name."""
    holders = [torch.cuda, *(m for name, m in sys.modules.items() if name.startswith("torch.cuda."))]
    for name, value in replacements.items():
        originals = [vars(module)[name] for module in holders if name in vars(module)]
        for module in holders:
            if any(vars(module).get(name, patches) is original for original in originals):
                patches.set(module, name, value)


def _load_to_cpu(patches: Patches) -> None:
    """`torch.load` puts what was saved on, or is asked for on, a CUDA device on the CPU."""
    restore = torch.serialization.default_restore_location

    def default_restore_location(storage: Any, location: str) -> Any:
        return restore(storage, "cpu" if names_cuda(location) else location)  # type: ignore[no-untyped-call]

    patches.set(torch.serialization, "default_restore_location", default_restore_location)


def _keep_foreign_memory_on_host(patches: Patches) -> None:
    """Tensors over foreign memory are on the host. torch offers these calls to no function mode."""
    for name in ("from_numpy", "frombuffer"):
        original = getattr(torch, name)

        def create(*args: Any, _original: Any = original, **kwargs: Any) -> torch.Tensor:
            tensor: torch.Tensor = _original(*args, **kwargs)
            mark_host(tensor)
            return tensor

        patches.set(torch, name, create)


def _move_modules_to_an_index(patches: Patches) -> None:
    """``module.to(0)``: torch reads the index itself, before it calls `Tensor.to` with a device."""
    parse = torch._C._nn._parse_to

    def parse_to(*args: Any, **kwargs: Any) -> Any:
        if args and names_cuda(args[0]):
            args = ("cuda", *args[1:])
        elif names_cuda(kwargs.get("device")):
            kwargs = {**kwargs, "device": "cuda"}
        return parse(*args, **kwargs)

    patches.set(torch._C._nn, "_parse_to", parse_to)


def _switch_dynamo_off(patches: Patches) -> None:
    """Keep ``torch.compile`` eager, whether torch's compiler was imported already or will be meanwhile."""
    config_name = "torch._dynamo.config"
    if config_name in sys.modules:
        patches.set(sys.modules[config_name], "disable", True)
    else:
        patches.on_undo(_enable_dynamo_if_imported, config_name, os.environ.get("TORCHDYNAMO_DISABLE"))
    patches.setitem(os.environ, "TORCHDYNAMO_DISABLE", "1")


def _enable_dynamo_if_imported(config_name: str, wanted: str | None) -> None:
    config: Any = sys.modules.get(config_name)
    if config is not None:
        config.disable = wanted == "1"
