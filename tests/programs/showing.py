"""What the programs here print: one line a result, with every bit in it, to be compared between runs."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist


def rank() -> int:
    return dist.get_rank()


def say(name: str, text: object) -> None:
    """Print a line that must be the same in a plain run, while recording and in a replay."""
    print(f"rank {rank()} {name}: {text}", flush=True)


def show(name: str, *tensors: torch.Tensor) -> None:
    """Say the bits of ``tensors``, and the values of small ones."""
    for tensor in tensors:
        dense = tensor.detach()
        if dense.layout is not torch.strided:
            dense = dense.to_dense()
        data = dense.resolve_conj().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        digest = hashlib.sha1(data).hexdigest()[:12]
        values = dense.tolist() if dense.numel() <= 8 else "..."
        say(name, f"{dense.dtype}{list(dense.shape)} {digest} {values}")


def expect(name: str, tensor: torch.Tensor, values: Any) -> None:
    """Show ``tensor`` and insist on its values."""
    show(name, tensor)
    wanted = torch.as_tensor(values, dtype=tensor.dtype).expand(tensor.shape)
    assert torch.equal(tensor.detach(), wanted), f"{name}: {tensor.tolist()}, not {wanted.tolist()}"


def finish(
    name: str, handle: dist.Work | torch.futures.Future[Any] | None, outputs: Iterable[torch.Tensor]
) -> None:
    """Wait for an asynchronous call and look at its handle in every way; None is a synchronous one.

    Some of torch's functions return the future of the Work instead of the Work. What is said of
    a ``handle`` may differ from a plain run: some of gloo's handles have no future, and some never
    become completed.
    """
    if handle is None:
        return
    try:
        future = handle.get_future() if isinstance(handle, dist.Work) else handle
    except RuntimeError:
        future = None
    if isinstance(handle, dist.Work):
        assert handle.wait() is True, name
        # gloo's point-to-point handles, which have no future, wait for ever the second time
        assert future is None or handle.wait() is True, f"{name}: a second wait"
        say(f"{name} handle", f"completed {handle.is_completed()}")
    if future is None:
        say(f"{name} handle", "no future")
        return
    future.wait()
    held = {tensor.data_ptr() for tensor in flat(future.value())}
    missing = [tuple(tensor.shape) for tensor in outputs if tensor.data_ptr() not in held]
    numel = sum(tensor.numel() for tensor in flat(future.value()))
    say(f"{name} handle", f"future {future.done()}, {numel} elements, without {missing}")
    if handle is future:
        # the program has nothing else to find its results by
        say(f"{name} result", structure(future.value()))


def structure(value: Any) -> Any:
    """Shapes of tensors, in the lists that they are in."""
    return (
        tuple(value.shape) if isinstance(value, torch.Tensor) else [structure(item) for item in value or ()]
    )


def flat(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for item in value or () for tensor in flat(item)]
