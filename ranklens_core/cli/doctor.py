"""``ranklens doctor``: what works on this machine."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import sys
import warnings
from collections.abc import Callable
from importlib import metadata

import click

from ranklens_core.errors import RankLensError

Finding = tuple[bool, str, str]
"""(good, what was found, what to do if it is not good)"""


@click.command()
def command() -> None:
    """Say what works on this machine, and what to do about what does not (exit status 2)."""
    bad = 0
    for name, check in _CHECKS.items():
        good, found, advice = check()
        bad += not good
        click.echo(f"{'ok  ' if good else 'BAD '} {name:<22}{found}")
        if advice:
            click.echo(f"     {'':<22}{advice}")
    sys.exit(2 if bad else 0)


def _python() -> Finding:
    return sys.version_info >= (3, 11), sys.version.split()[0], ""


def _torch() -> Finding:
    import torch

    numbers = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    good = numbers >= (2, 11)
    return good, torch.__version__, "" if good else "RankLens needs torch 2.11 or newer."


def _operators() -> Finding:
    from ranklens_core.c10d.ops import operators

    try:
        return True, f"all {len(operators())} communication operators known", ""
    except RankLensError as error:
        return False, "unknown c10d operators", str(error)


def _interposition() -> Finding:
    """Makes a group of one, sends a call through a handler, and looks whether torch is as before."""
    import torch
    import torch.distributed as dist

    from ranklens_core.c10d.call import Call, Proceed
    from ranklens_core.c10d.interpose import install

    class Seen:
        calls = 0

        def handle(self, call: Call, proceed: Proceed) -> object:
            self.calls += 1
            return proceed()

        def on_wait(self, work: object, wait: Callable[[], object]) -> object:
            return wait()

        def start_batch(self, pg: object) -> None: ...

        def end_batch(self, pg: object, proceed: Proceed) -> object:
            return proceed()

    if dist.is_initialized():
        return False, "torch.distributed is in use", "Run doctor in a process of its own."
    seen = Seen()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    interposer = install(seen)  # type: ignore[arg-type]
    try:
        dist.all_reduce(torch.ones(1))
        inside = seen.calls
    finally:
        interposer.remove()
        dist.all_reduce(torch.ones(1))
        dist.destroy_process_group()
    good = inside == 1 and seen.calls == 1
    return good, "calls are seen, and torch is as before afterwards" if good else "calls are not seen", ""


def _gpu() -> Finding:
    import torch

    if torch.cuda.is_available():
        return True, f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}", ""
    return True, "none: Megatron programs run on the CPU stand-in, DeepSpeed on its CPU accelerator", ""


def _framework(module: str, distribution: str, extra: str) -> Callable[[], Finding]:
    def check() -> Finding:
        try:
            version = metadata.version(distribution)
        except metadata.PackageNotFoundError:
            return True, f"not installed (pip install 'ranklens[{extra}]')", ""
        try:
            with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
                # frameworks greet at import with what they lack; the question here is only whether it works
                warnings.simplefilter("ignore")
                importlib.import_module(module)
        except Exception as error:  # whatever a broken installation raises is the finding
            return False, f"{version}, but importing it fails: {error}", f"Reinstall {distribution}."
        return True, version, ""

    return check


def _cores() -> Finding:
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return True, f"{count} for this process (local ranks share them)", ""


_CHECKS: dict[str, Callable[[], Finding]] = {
    "python": _python,
    "cores": _cores,
    "torch": _torch,
    "c10d operators": _operators,
    "interposition": _interposition,
    "gpu": _gpu,
    "deepspeed": _framework("deepspeed", "deepspeed", "deepspeed"),
    "megatron-core": _framework("megatron.core", "megatron-core", "megatron"),
}
