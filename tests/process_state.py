"""What a test must leave as it was, seen at one moment; ``changes`` puts the differences in words.

torch is looked at only if something imported it already, so that light tests stay light. State
that first exists after the test (torch imported by it) is compared with torch's state at import.
"""

from __future__ import annotations

import importlib
import os
import re
import signal
import sys
import threading
from dataclasses import dataclass
from functools import cache
from typing import Any

import psutil

WATCHED = [
    "atexit",
    "builtins",
    "ctypes:CDLL",
    "os",
    "os:_Environ",
    "posix",
    "pdb:Pdb",
    "subprocess",
    "threading:Thread",
    "torch",
    "torch._C",
    "torch._C._distributed_c10d:FakeProcessGroup",
    "torch._C._distributed_c10d:ProcessGroup",
    "torch._C._distributed_c10d:Work",
    "torch._C._nn",
    "torch:Tensor",
    "torch.amp.autocast_mode",
    "torch.amp.autocast_mode:autocast",
    "torch.autograd",
    "torch.cuda",
    "torch.cuda.*",
    "torch.distributed",
    "torch.distributed._symmetric_memory",
    "torch.distributed.distributed_c10d",
    "torch.distributed.rendezvous",
    "torch.nn:Module",
    "torch.optim:Optimizer",
    "torch.serialization",
    "torch.utils.checkpoint",
    "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer",
    "megatron.core.optimizer.layer_wise_optimizer:LayerWiseDistributedOptimizer",
    "megatron.core.optimizer.optimizer:ChainedOptimizer",
    "megatron.core.optimizer.optimizer:FP32Optimizer",
    "megatron.core.optimizer.optimizer:Float16OptimizerWithFloat16Params",
    "megatron.core.optimizer.optimizer:MegatronOptimizer",
    "megatron.core.optimizer.optimizer:MixedPrecisionOptimizer",
    "megatron.core.parallel_state",
    "megatron.core.pipeline_parallel.schedules",
    "deepspeed",
    "deepspeed.comm",
    "deepspeed.ops.op_builder.dc:DeepCompileBuilder",
    "deepspeed.runtime.engine:DeepSpeedEngine",
    "deepspeed.runtime.pipe.engine:PipelineEngine",
    "deepspeed.utils.groups",
]
"""``module``, ``module.*`` (those below it) or ``module:Class``: no function or class in there may be another
after a test.

Whoever patches something adds where it lives; ``test_process_state.py`` finds what was forgotten. Modules
that nobody imported are left alone.
"""

PATCHED_BY_LIBRARIES = {
    ("torch", "manual_seed"): "torch._dynamo wraps it when it is first imported",
}
"""What changes without RankLens, with the reason."""

VARIABLES_OF_LIBRARIES = {
    "PYTEST_CURRENT_TEST": "pytest's own",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "set by importing deepspeed",
    "TORCHINDUCTOR_CACHE_DIR": "set by importing torch._inductor, as megatron-core does",
    "KMP_INIT_AT_FORK": "set by importing torch where it is built with Intel's OpenMP",
    "KMP_DUPLICATE_LIB_OK": "set by importing torch where it is built with Intel's OpenMP",
}
"""Environment variables that change without RankLens, with the reason."""

OWN_THREADS = "ranklens"
"""Threads whose names begin so must be gone after a test even where they are daemons."""


@dataclass(frozen=True)
class ProcessState:
    """``values`` are compared by ``==``, ``objects`` by identity, ``threads`` and ``children`` as sets."""

    values: dict[str, Any]
    objects: dict[str, Any]
    kernels: dict[str, str]
    threads: frozenset[threading.Thread]
    children: frozenset[int]

    @classmethod
    def capture(cls) -> ProcessState:
        return cls(
            values=_interpreter() | _torch_settings(),
            objects=_functions(),
            kernels=_c10d_kernels(),
            threads=frozenset(_threads()),
            children=frozenset(_children()),
        )

    def changes(self, after: ProcessState) -> list[str]:
        """One line for each difference from here to ``after``; empty if there is none."""
        lines = []
        for name in self.values.keys() | after.values.keys():
            old, new = self.values.get(name), after.values.get(name)
            if name not in self.values:
                old = _AT_IMPORT.get(name)
            if old != new:
                lines.append(f"{name}: was {old!r}, is {new!r}")
        for name, old in self.objects.items():
            if after.objects.get(name) is not old:
                lines.append(f"{name} is another function: was {old!r}, is {after.objects.get(name)!r}")
        for name, dump in after.kernels.items():
            lines += [
                f"{name} has another kernel: {line}" for line in _new_kernels(self.kernels.get(name), dump)
            ]
        lines += [f"thread {thread.name!r} is still alive" for thread in after.threads - self.threads]
        lines += [f"child process {pid} was not waited for" for pid in after.children - self.children]
        return sorted(lines)


_AT_IMPORT: dict[str, Any] = {
    "torch.distributed.is_initialized()": False,
    "torch.get_default_dtype()": "torch.float32",
    "torch.are_deterministic_algorithms_enabled()": False,
    "function modes": 0,
}
"""Torch's state when freshly imported; a setting whose start depends on the machine is taken from
the first state seen."""


def _interpreter() -> dict[str, Any]:
    variables = {name: value for name, value in os.environ.items() if name not in VARIABLES_OF_LIBRARIES}
    values: dict[str, Any] = {f"os.environ[{name!r}]": value for name, value in variables.items()}
    values["sys.argv"] = list(sys.argv)
    values["sys.path"] = list(sys.path)
    values["sys.meta_path"] = list(sys.meta_path)
    values["sys.excepthook"] = _excepthook()
    values["sys.modules['__main__']"] = sys.modules.get("__main__")
    values["working directory"] = os.getcwd()
    for number in (signal.SIGINT, signal.SIGTERM):
        values[f"handler of {number.name}"] = signal.getsignal(number)
    return values


def _excepthook() -> Any:
    """The hook for uncaught exceptions, Python's where it is the one that init_process_group leaves."""
    hook = sys.excepthook
    return (
        sys.__excepthook__
        if getattr(hook, "__module__", "") == "torch.distributed.distributed_c10d"
        else hook
    )


def _torch_settings() -> dict[str, Any]:
    torch = sys.modules.get("torch")
    if torch is None:
        return {}
    values = {
        "torch.get_num_threads()": torch.get_num_threads(),
        "torch.get_default_dtype()": str(torch.get_default_dtype()),
        "torch.are_deterministic_algorithms_enabled()": torch.are_deterministic_algorithms_enabled(),
        "torch.backends.cuda.matmul.allow_tf32": torch.backends.cuda.matmul.allow_tf32,
        "torch.distributed.is_initialized()": torch.distributed.is_initialized(),
        "function modes": len(torch.overrides._get_current_function_mode_stack()),
    }
    for name in ("torch.get_num_threads()", "torch.backends.cuda.matmul.allow_tf32"):
        _AT_IMPORT.setdefault(name, values[name])
    return values


def watched() -> dict[str, Any]:
    """The modules and classes of ``WATCHED`` that are there, by name."""
    found: dict[str, Any] = {}
    for place in WATCHED:
        module_name, _, class_name = place.partition(":")
        if module_name.endswith(".*"):
            below = [name for name in list(sys.modules) if name.startswith(module_name[:-1])]
            found |= {name: sys.modules[name] for name in below}
        elif module_name in sys.modules:
            module = sys.modules[module_name]
            found[place] = getattr(module, class_name) if class_name else module
    return found


def _functions() -> dict[str, Any]:
    """Functions and classes of the watched places that are imported, by ``place.name``."""
    found = {}
    for place, namespace in watched().items():
        for name, value in list(vars(namespace).items()):
            # By type(): asking torch's deprecated aliases for their class makes them warn.
            is_code = callable(value) or issubclass(type(value), property | staticmethod | classmethod)
            if is_code and (place, name) not in PATCHED_BY_LIBRARIES:
                found[f"{place}.{name}"] = value
    return found


def _c10d_kernels() -> dict[str, str]:
    """The dispatcher's table of each c10d operator, as text."""
    torch = sys.modules.get("torch")
    if torch is None:
        return {}
    return {name: torch._C._dispatch_dump(name) for name in _c10d_operators()}


@cache
def _c10d_operators() -> tuple[str, ...]:
    torch = importlib.import_module("torch")
    names = {schema.name for schema in torch._C._jit_get_all_schemas()}
    return tuple(sorted(name for name in names if name.startswith("c10d::")))


_KERNEL = re.compile(
    r"^(?:BackendSelect|CPU|CUDA|Autograd\w*|SparseCPU|SparseCUDA|PrivateUse1)[^:]*: .*", re.MULTILINE
)


def _new_kernels(old: str | None, new: str) -> list[str]:
    """Kernels of the dump ``new`` that ``old`` has not; where there is no ``old``, those not torch's C++."""
    kernels = _KERNEL.findall(new)
    if old is None:
        return [kernel for kernel in kernels if "/torch/csrc/distributed/c10d/" not in kernel]
    known = set(_KERNEL.findall(old))
    missing = [f"gone: {kernel}" for kernel in known - set(kernels)]
    return [kernel for kernel in kernels if kernel not in known] + missing


def _threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if not t.daemon or t.name.startswith(OWN_THREADS)]


def _children() -> list[int]:
    """Children of this process, the ones that ended and were not waited for included."""
    tracker = sys.modules.get("multiprocessing.resource_tracker")
    # Python starts it once and keeps it until the interpreter exits.
    kept = getattr(getattr(tracker, "_resource_tracker", None), "_pid", None)
    return [child.pid for child in psutil.Process().children() if child.pid != kept]
