"""Tensors of every kind and state, as outputs of calls that write into them."""

from __future__ import annotations

import threading
import warnings

import torch
import torch.distributed as dist
from showing import expect, rank, say, show


def main() -> None:
    warnings.simplefilter("ignore", FutureWarning)
    dist.init_process_group("gloo")
    layouts()
    dtypes()
    views()
    leaves()
    inference()
    second_thread()
    dist.destroy_process_group()


def layouts() -> None:
    transposed = torch.arange(6.0).view(2, 3).t() + rank()
    dist.broadcast(transposed, 1)
    expect("transposed", transposed, torch.arange(6.0).view(2, 3).t() + 1)

    base = torch.zeros(4, 4)
    column = base[:, 1]
    column += rank() + 1
    for is_async in (False, True):
        parts = [torch.zeros(4, 2)[:, 0] for _ in range(4)]
        attempt_gather("strided parts", parts, column, is_async)
    channels_last = torch.full((1, 2, 2, 2), float(rank())).to(memory_format=torch.channels_last)
    dist.broadcast(channels_last, 2)
    expect("channels last", channels_last, 2)

    for shape in ((0,), (0, 3), (2, 0)):
        empty = torch.zeros(shape)
        dist.broadcast(empty, 0)
        show("empty", empty)
    scalar = torch.tensor(rank() + 1.0)
    dist.all_reduce(scalar)
    expect("scalar", scalar, 10)
    gathered = [torch.tensor(0.0) for _ in range(4)]
    dist.all_gather(gathered, scalar + rank())
    expect("scalars", torch.stack(gathered), [10, 11, 12, 13])


def attempt_gather(name: str, parts: list[torch.Tensor], own: torch.Tensor, is_async: bool) -> None:
    """gloo takes some strided tensors and refuses others: both alike in a replay."""
    try:
        work = dist.all_gather(parts, own, async_op=is_async)
        if work is not None:
            work.wait()
    except Exception as error:
        say(name, f"{type(error).__name__}: {error}")
        return
    show(name, *parts)


def dtypes() -> None:
    for dtype in (
        torch.bool,
        torch.int8,
        torch.int32,
        torch.float16,
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.complex64,
        torch.complex128,
    ):
        tensor = torch.tensor([rank(), 1, 0]).to(dtype)
        try:
            dist.broadcast(tensor, 3)
        except Exception as error:
            say(f"broadcast {dtype}", f"{type(error).__name__}: {error}")
            continue
        expect(f"broadcast {dtype}", tensor, torch.tensor([3, 1, 0]).to(dtype))
    # floats whose bits an arithmetic copy would change
    special = torch.tensor([0x7F800001, -1, -(2**31), 0x7FC00000 + rank()], dtype=torch.int32).view(
        torch.float32
    )
    dist.broadcast(special, 2)
    show("special floats", special)


def views() -> None:
    """Outputs that share memory with one another and with the input."""
    flat = torch.zeros(8)
    parts = list(flat.chunk(4))
    parts[rank()] += rank() + 1
    dist.all_gather(parts, parts[rank()])
    expect("parts of one", flat, [1, 1, 2, 2, 3, 3, 4, 4])
    own = flat[2 * rank() : 2 * rank() + 2]
    own += 10
    dist.all_gather_into_tensor(flat, own)
    expect("in place", flat, [11, 11, 12, 12, 13, 13, 14, 14])


def leaves() -> None:
    """Results are written below autograd: no error, no new version, gradients as without."""
    leaf = torch.full((3,), rank() + 1.0, requires_grad=True)
    doubled = leaf * leaf
    version = leaf._version
    dist.broadcast(leaf.data, 1)
    dist.all_reduce(leaf.detach())
    say("version", leaf._version - version)
    doubled.sum().backward()
    show("gradient", leaf.grad if leaf.grad is not None else torch.empty(0))
    expect("leaf", leaf, 8)

    wide = torch.zeros(3, 2, requires_grad=True)
    saved = (wide * wide).sum()
    # gloo wants the leaf itself here, not a view of its data
    strided = wide.t()
    version = wide._version
    with torch.no_grad():
        dist.broadcast(strided, 2)
    say("strided version", wide._version - version)
    saved.backward()
    show("strided gradient", wide.grad if wide.grad is not None else torch.empty(0))

    parameter = torch.nn.Parameter(torch.full((2,), float(rank())))
    dist.broadcast(parameter, 3)
    expect("parameter", parameter, 3)
    assert parameter.is_leaf
    assert parameter.requires_grad
    out = torch.zeros(1)
    dist.reduce_scatter_tensor(out, torch.ones(4, requires_grad=True))
    expect("from a leaf", out, 4)
    say("grows no graph", out.requires_grad)
    with torch.no_grad():
        out = torch.zeros(1)
        work = dist.reduce_scatter_tensor(out, torch.ones(4, requires_grad=True), async_op=True)
        assert work is not None
        work.wait()
    expect("from a leaf, later", out, 4)
    say("grows no graph later", out.requires_grad)


def inference() -> None:
    with torch.inference_mode():
        tensor = torch.full((2, 2), rank() + 1.0)
        dist.all_reduce(tensor)
        expect("inference", tensor, 10)
        work = dist.all_reduce(tensor, async_op=True)
        assert work is not None
        work.wait()
        expect("inference async", tensor, 40)
        strided = tensor.t()
        dist.broadcast(strided, 0)
        expect("inference strided", strided, 40)
        out = torch.zeros(1)
        work = dist.reduce_scatter_tensor(out, tensor.reshape(-1), async_op=True)
        assert work is not None
        work.wait()
        expect("inference reduce_scatter", out, 160)
    dist.all_reduce(tensor)
    expect("inference tensor outside", tensor, 160)


def second_thread() -> None:
    """Two threads, each with a group of its own, call at the same time."""
    groups = [dist.new_group(), dist.new_group()]
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for turn in range(20):
                tensor = torch.tensor([float(number + turn)])
                handle = dist.all_reduce(tensor, group=groups[number], async_op=turn % 2 == 0)
                if handle is not None:
                    handle.wait()
                assert tensor.item() == 4.0 * (number + turn)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    say("threads", failures)


main()
