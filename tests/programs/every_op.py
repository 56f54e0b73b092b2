"""Every c10d operator that gloo has, synchronous and asynchronous, with the values it must give."""

from __future__ import annotations

import warnings
from datetime import timedelta

import torch
import torch.distributed as dist
from showing import expect, finish, rank, say, show

ReduceOp = dist.ReduceOp


def main() -> None:
    # torch's newer names for some of these are not in the oldest torch we support
    warnings.simplefilter("ignore", FutureWarning)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    for is_async in (False, True):
        reductions(is_async)
        gathers(is_async)
        scatters(is_async)
        exchanges(is_async)
        barriers(is_async)
    coalesced()
    sparse()
    unsupported()
    dist.destroy_process_group()


def named(op: str, is_async: bool) -> str:
    return f"{op} {'async' if is_async else 'sync'}"


def own(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """This rank's part: rank + 1 everywhere."""
    return torch.full(shape, rank() + 1, dtype=dtype)


def reductions(is_async: bool) -> None:
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8):
        for op, result in (
            (ReduceOp.SUM, 10),
            (ReduceOp.PRODUCT, 24),
            (ReduceOp.MIN, 1),
            (ReduceOp.MAX, 4),
        ):
            tensor = own(3, dtype=dtype)
            work = dist.all_reduce(tensor, op, async_op=is_async)
            finish(f"all_reduce {op} {dtype}", work, [tensor])
            expect(named(f"all_reduce {op} {dtype}", is_async), tensor, result)
    for op, result in ((ReduceOp.BAND, 0), (ReduceOp.BOR, 7), (ReduceOp.BXOR, 4)):
        tensor = own(2, dtype=torch.int32)
        work = dist.all_reduce(tensor, op, async_op=is_async)
        finish(f"all_reduce {op}", work, [tensor])
        expect(named(f"all_reduce {op}", is_async), tensor, result)
    for root in range(2):
        tensor = own(2, 2)
        work = dist.reduce(tensor, root, async_op=is_async)
        finish("reduce", work, [tensor])
        # what a rank that is not the root finds in its tensor is gloo's own affair, and shown
        show(named(f"reduce to {root}", is_async), tensor)
        assert rank() != root or bool((tensor == 10).all())
    tensor = own(5)
    work = dist.broadcast(tensor, 2, async_op=is_async)
    finish("broadcast", work, [tensor])
    expect(named("broadcast", is_async), tensor, 3)


def gathers(is_async: bool) -> None:
    parts = [torch.zeros(2) for _ in range(4)]
    work = dist.all_gather(parts, own(2), async_op=is_async)
    finish("all_gather", work, parts)
    expect(named("all_gather", is_async), torch.stack(parts), [[1.0] * 2, [2.0] * 2, [3.0] * 2, [4.0] * 2])

    whole = torch.zeros(8)
    work = dist.all_gather_into_tensor(whole, own(2), async_op=is_async)
    finish("all_gather_into_tensor", work, [whole])
    expect(named("all_gather_into_tensor", is_async), whole, [1, 1, 2, 2, 3, 3, 4, 4])

    lists = [[torch.zeros(2), torch.zeros(3)] for _ in range(4)]
    work = dist.all_gather_coalesced(lists, [own(2), own(3) * 10], async_op=is_async)
    finish("all_gather_coalesced", work, [tensor for part in lists for tensor in part])
    for peer, part in enumerate(lists):
        expect(
            named(f"all_gather_coalesced {peer}", is_async),
            torch.cat(part),
            [peer + 1] * 2 + [10 * peer + 10] * 3,
        )

    gathered = [torch.zeros(2) for _ in range(4)] if rank() == 1 else None
    work = dist.gather(own(2), gathered, dst=1, async_op=is_async)
    finish("gather", work, gathered or [])
    if gathered is not None:
        expect(named("gather", is_async), torch.cat(gathered), [1, 1, 2, 2, 3, 3, 4, 4])


def scatters(is_async: bool) -> None:
    parts = [torch.full((2,), float(10 * rank() + peer)) for peer in range(4)]
    out = torch.zeros(2)
    work = dist.reduce_scatter(out, parts, async_op=is_async)
    finish("reduce_scatter", work, [out])
    expect(named("reduce_scatter", is_async), out, 60 + 4 * rank())

    out = torch.zeros(2)
    work = dist.reduce_scatter_tensor(out, torch.cat(parts), ReduceOp.MAX, async_op=is_async)
    finish("reduce_scatter_tensor", work, [out])
    expect(named("reduce_scatter_tensor", is_async), out, 30 + rank())

    out = torch.zeros(2)
    work = dist.scatter(out, parts if rank() == 3 else None, src=3, async_op=is_async)
    finish("scatter", work, [out])
    expect(named("scatter", is_async), out, 30 + rank())


def exchanges(is_async: bool) -> None:
    sends = [torch.full((2,), float(10 * rank() + peer)) for peer in range(4)]
    receives = [torch.zeros(2) for _ in range(4)]
    work = dist.all_to_all(receives, sends, async_op=is_async)
    finish("all_to_all", work, receives)
    expect(
        named("all_to_all", is_async), torch.stack(receives)[:, 0], [peer * 10 + rank() for peer in range(4)]
    )

    out = torch.zeros(4)
    work = dist.all_to_all_single(out, torch.arange(4.0) + 10 * rank(), async_op=is_async)
    finish("all_to_all_single", work, [out])
    expect(named("all_to_all_single", is_async), out, [peer * 10 + rank() for peer in range(4)])

    # rank r sends (r + i) % 3 elements to rank i, none to some
    sent = [(rank() + peer) % 3 for peer in range(4)]
    received = [(peer + rank()) % 3 for peer in range(4)]
    out = torch.zeros(sum(received), dtype=torch.int64)
    work = dist.all_to_all_single(out, own(sum(sent), dtype=torch.int64), received, sent, async_op=is_async)
    finish("all_to_all_single uneven", work, [out])
    wanted = [peer + 1 for peer in range(4) for _ in range(received[peer])]
    expect(named("all_to_all_single uneven", is_async), out, wanted)


def barriers(is_async: bool) -> None:
    work = dist.barrier(async_op=is_async)
    if work is not None:
        work.wait()
        assert work.is_completed()
    if not is_async:
        dist.monitored_barrier(timeout=timedelta(seconds=30), wait_all_ranks=True)
    say(named("barriers", is_async), "passed")


def coalesced() -> None:
    tensors = [own(2), own(3) * 2]
    work = dist.all_reduce_coalesced(tensors, ReduceOp.SUM, async_op=True)
    finish("all_reduce_coalesced", work, tensors)
    expect("all_reduce_coalesced", torch.cat(tensors), [10, 10, 20, 20, 20])
    dist.all_reduce_coalesced(tensors, ReduceOp.MAX)
    expect("all_reduce_coalesced sync", torch.cat(tensors), [10, 10, 20, 20, 20])


def sparse() -> None:
    """Each rank has entries of its own: the result has all of them."""
    indices = torch.tensor([[rank(), 5], [0, 1]])
    tensor = torch.sparse_coo_tensor(
        indices, torch.tensor([1.0 + rank(), 2.0]), (6, 2), check_invariants=True
    )
    dist.all_reduce(tensor)
    expect("all_reduce sparse", tensor.to_dense(), [[1, 0], [2, 0], [3, 0], [4, 0], [0, 0], [0, 8]])
    tensor = torch.sparse_coo_tensor(
        indices, torch.tensor([1.0 + rank(), 2.0]), (6, 2), check_invariants=True
    )
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None
    work.wait()
    show("all_reduce sparse async", tensor)


def unsupported() -> None:
    """What gloo refuses is refused in the same words."""
    for op in (ReduceOp.AVG, dist._make_nccl_premul_sum(2.0)):
        tensor = own(2)
        try:
            dist.all_reduce(tensor, op)
        except Exception as error:
            say("refused", f"{type(error).__name__}: {str(error).splitlines()[0]}")
        else:
            show("all_reduce AVG", tensor)


main()
