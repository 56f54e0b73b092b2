"""Whether a program needs the CPU stand-in for CUDA, and putting it in."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from ranklens_core.errors import UsageError
from ranklens_core.patches import Patches


def wants_cpu_cuda(asked: bool, frameworks: Sequence[str]) -> bool:
    """Whether to put the stand-in in: when asked, and for Megatron where there is no GPU.

    ``frameworks`` are the modules the program imports. Never for DeepSpeed: it has its own CPU
    accelerator and would take the stand-in for a GPU; asking for it raises ``UsageError``.
    """
    import torch

    deepspeed = any(name.split(".")[0] == "deepspeed" for name in frameworks)
    if asked and deepspeed:
        raise UsageError(
            "--cpu is not for DeepSpeed programs: DeepSpeed trains on the CPU by itself (DS_ACCELERATOR=cpu)."
        )
    if asked and torch.cuda.is_available():
        raise UsageError(
            "--cpu: there is a GPU here. Hide it with CUDA_VISIBLE_DEVICES= to train on the CPU."
        )
    if asked or deepspeed or torch.cuda.is_available():
        return asked
    if any(name.split(".")[0] == "megatron" for name in frameworks):
        print(
            "ranklens: no GPU here: running the Megatron program on the CPU (--cpu)",
            file=sys.stderr,
            flush=True,
        )
        return True
    return False


@contextmanager
def cpu_cuda_context(wanted: bool) -> Iterator[None]:
    """The stand-in as a context; nothing if it is not wanted or in place already."""
    if not wanted:
        yield
        return
    with Patches() as patches:
        if "TORCHDYNAMO_DISABLE" not in os.environ:
            patches.setitem(os.environ, "TORCHDYNAMO_DISABLE", "1")  # before the import, which reads it
        from ranklens_core.cpu_cuda import cpu_cuda, is_installed

        if not is_installed():
            patches.enter(cpu_cuda())
        yield
