"""The function mode that turns every mention of a CUDA device into the CPU."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.utils._device
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode, _push_mode

from ranklens_core.patches import Patches

from .naming import names_device, names_host
from .random import DeviceRandom, drawing_functions
from .residence import is_host, mark_host, moved

_Function = Callable[..., Any]
_Kwargs = dict[str, Any]

# Create a tensor on the side where their first argument is.
_LIKE = frozenset(
    getattr(owner, name)
    for owner, names in {
        torch: "empty_like zeros_like ones_like full_like rand_like randn_like randint_like",
        torch.Tensor: "new_empty new_zeros new_ones new_full new_tensor new_empty_strided",
    }.items()
    for name in names.split()
)


class CudaOnCpu(TorchFunctionMode):
    """Sends what names a CUDA device to the CPU, keeping track of what would have been on the device.

    ``device="cuda"`` (a string, a `torch.device` or an index, also as default device) becomes the CPU;
    ``pin_memory`` is dropped; `.cuda()`, `.cpu()` and `.to()` copy between the sides of `residence`. A tensor
    on the device answers ``torch.cuda.FloatTensor`` to `type()`. Random draws on the device come from its own
    generator.
    """

    def __init__(self, random: DeviceRandom) -> None:
        super().__init__()
        self._random = random
        self._drawing = drawing_functions()
        self._factories = frozenset(torch.utils._device._device_constructors())
        self._creating = self._factories | _LIKE
        tensor = torch.Tensor
        self._special: dict[_Function, _Function] = {
            tensor.to: self._to,
            tensor.cuda: self._cuda,
            tensor.cpu: self._cpu,
            tensor.type: self._type,
            tensor.pin_memory: self._pin_memory,
        }

    def __torch_function__(
        self, func: _Function, types: Any, args: tuple[Any, ...] = (), kwargs: _Kwargs | None = None
    ) -> Any:
        kwargs = kwargs or {}
        special = self._special.get(func)
        if special is not None:
            return special(func, args, kwargs)
        if not kwargs and func not in self._creating and func not in self._drawing:
            return func(*args)
        return self._call(func, args, kwargs)

    def _call(self, func: _Function, args: tuple[Any, ...], kwargs: _Kwargs) -> Any:
        device = kwargs.get("device")
        if device is None and func in self._factories:
            device = torch.utils._device.CURRENT_DEVICE  # torch.set_default_device, `with torch.device(...)`
        on_device = names_device(device)
        if on_device:
            kwargs = {**kwargs, "device": "cpu"}
        if kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}

        if self._draws_on_device(func, args, kwargs, on_device):
            with self._random.drawing():
                result = func(*args, **kwargs)
        else:
            result = func(*args, **kwargs)

        on_host = func in self._factories or names_host(device) or is_host(args[0] if args else None)
        if func in self._creating and on_host and not on_device:
            mark_host(result)
        return result

    def _draws_on_device(
        self, func: _Function, args: tuple[Any, ...], kwargs: _Kwargs, on_device: bool
    ) -> bool:
        if func not in self._drawing or kwargs.get("generator") is not None:
            return False
        if on_device:
            return True
        tensors = (v for v in (*args, *kwargs.values()) if isinstance(v, torch.Tensor))
        first = next(tensors, None)
        return first is not None and not is_host(first)

    def _to(self, func: _Function, args: tuple[Any, ...], kwargs: _Kwargs) -> Any:
        device = kwargs.get("device", args[1] if len(args) > 1 else None)
        if names_device(device):
            if "device" in kwargs:
                kwargs = {**kwargs, "device": "cpu"}
            else:
                args = (args[0], "cpu", *args[2:])
            return moved(args[0], func(*args, **kwargs), to_device=True)
        result = func(*args, **kwargs)
        return moved(args[0], result, to_device=False) if names_host(device) else result

    def _cuda(self, func: _Function, args: tuple[Any, ...], kwargs: _Kwargs) -> Any:
        memory_format = kwargs.get("memory_format", torch.preserve_format)
        result = torch.Tensor.to(args[0], "cpu", memory_format=memory_format)
        return moved(args[0], result, to_device=True)

    def _cpu(self, func: _Function, args: tuple[Any, ...], kwargs: _Kwargs) -> Any:
        return moved(args[0], func(*args, **kwargs), to_device=False)

    def _type(self, func: _Function, args: tuple[Any, ...], kwargs: _Kwargs) -> Any:
        tensor = args[0]
        dtype = kwargs.get("dtype", args[1] if len(args) > 1 else None)
        if dtype is None:
            name = str(func(tensor))
            return name if is_host(tensor) else name.replace("torch.", "torch.cuda.", 1)
        if not isinstance(dtype, str):
            return func(*args, **kwargs)
        result = func(tensor, dtype.replace("torch.cuda.", "torch.", 1))
        return moved(tensor, result, to_device=dtype.startswith("torch.cuda."))

    def _pin_memory(self, func: _Function, args: tuple[Any, ...], kwargs: _Kwargs) -> Any:
        result = args[0].clone()
        mark_host(result)
        return result

    # Where the mode is active. A function mode belongs to a thread, and torch takes it off while it handles
    # a function; `Tensor.backward` is one, and would run the program's own backward functions without it.

    def is_active(self) -> bool:
        """Whether torch calls in this thread go through the mode now."""
        return self._is_on_stack() and not torch._C._is_torch_function_all_disabled()

    def _is_on_stack(self) -> bool:
        return any(mode is self for mode in _get_current_function_mode_stack())

    def activate(self, patches: Patches) -> None:
        """Make the mode active in this thread, in threads it starts, and in backward passes.

        To be undone in this same thread.
        """
        _push_mode(self)
        patches.on_undo(self._deactivate)
        run_backward = torch.autograd.graph._engine_run_backward
        patches.set(torch.autograd, "_engine_run_backward", self._inside(run_backward))

        start = threading.Thread.start

        def start_inside(thread: threading.Thread) -> None:
            # On the instance: subclasses override `run`.
            thread.run = self._inside(thread.run)  # type: ignore[method-assign]
            start(thread)

        patches.set(threading.Thread, "start", start_inside)

    def _inside(self, function: _Function) -> _Function:
        def run(*args: Any, **kwargs: Any) -> Any:
            if self._is_on_stack():
                return function(*args, **kwargs)
            with self:
                return function(*args, **kwargs)

        return run

    def _deactivate(self) -> None:
        """Take the mode off, also from beneath modes that the program has put on since."""
        above = []
        while (mode := _pop_mode()) is not self:
            above.append(mode)
        for mode in reversed(above):
            _push_mode(mode)
