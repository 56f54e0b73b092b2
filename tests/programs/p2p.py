"""Point-to-point calls: blocking and not, from any source, batched, with tags, fire and forget."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist
from showing import expect, finish, rank, say


def main() -> None:
    warnings.simplefilter("ignore", FutureWarning)
    dist.init_process_group("gloo")
    after, before = (rank() + 1) % 4, (rank() - 1) % 4
    ring(after, before)
    tags(after, before)
    any_source()
    dist.barrier()
    batch(after, before)
    polled(after, before)
    forgotten()
    coalesced_manager(after, before)
    odd = dist.new_group([1, 3])
    if rank() in (1, 3):
        in_a_group(odd)
    dist.barrier()
    dist.destroy_process_group()


def ring(after: int, before: int) -> None:
    received = torch.zeros(3)
    sent = dist.isend(torch.full((3,), float(rank())), after)
    say("source", dist.recv(received, before))
    sent.wait()
    expect("ring", received, before)


def tags(after: int, before: int) -> None:
    """Messages overtake one another by tag."""
    first, second = torch.zeros(1), torch.zeros(1)
    sends = [dist.isend(torch.tensor([10.0 * tag + rank()]), after, tag=tag) for tag in (7, 8)]
    late = dist.irecv(second, before, tag=8)
    early = dist.irecv(first, before, tag=7)
    finish("tag 7", early, [first])
    finish("tag 8", late, [second])
    for work in sends:
        work.wait()
    expect("tags", torch.cat([first, second]), [70 + before, 80 + before])


def any_source() -> None:
    """Rank 0 takes what comes; in which order is the network's choice, and the trace's to repeat."""
    if rank() != 0:
        dist.send(torch.full((2,), float(rank())), 0)
        dist.send(torch.full((2,), 10.0 + rank()), 0)
        return
    for number in range(3):
        tensor = torch.zeros(2)
        say(f"any source handle {number}", dist.recv(tensor))
        # which rank it was is in the tensor too
        say(f"any value handle {number}", tensor.tolist())
    for number in range(3):
        tensor = torch.zeros(2)
        work = dist.irecv(tensor)
        assert work is not None
        work.wait()
        assert work.is_completed()
        say(f"any source later handle {number}", f"{work._source_rank()} {tensor.tolist()}")
        assert int(tensor[0]) % 10 == work._source_rank()


def batch(after: int, before: int) -> None:
    forth, back = torch.zeros(2, 2), torch.zeros(4)
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, torch.full((2, 2), float(rank())), after),
            dist.P2POp(dist.irecv, forth, before),
            dist.P2POp(dist.isend, torch.full((4,), rank() + 0.5), before),
            dist.P2POp(dist.irecv, back, after),
        ]
    )
    for work in works:
        work.wait()
    expect("batch forth", forth, before)
    expect("batch back", back, after + 0.5)


def polled(after: int, before: int) -> None:
    """A program may poll instead of waiting."""
    tensor = torch.zeros(1)
    work = dist.all_reduce(tensor.add_(1), async_op=True)
    assert work is not None
    poll(work.is_completed)
    expect("polled", tensor, 4)


def poll(is_done: Callable[[], bool]) -> None:
    while not is_done():
        pass


def forgotten() -> None:
    """Nobody keeps the handle; a later call on the same group is the only sign of its end."""
    tensor = torch.ones(2)
    dist.all_reduce(tensor, async_op=True)
    later = torch.ones(1)
    dist.all_reduce(later)
    # gloo runs calls of a group in order, on more than one thread: only a barrier tells for sure
    dist.barrier()
    poll(lambda: float(tensor[0]) == 4.0)
    expect("forgotten", tensor, 4)
    expect("later", later, 4)


def coalesced_manager(after: int, before: int) -> None:
    """The fast paths of the coalescing manager: one coalesced call for all in the block."""
    manager = dist.distributed_c10d._coalescing_manager
    tensors = [torch.ones(2), torch.full((3,), 2.0)]
    with manager() as batched:
        for tensor in tensors:
            dist.all_reduce(tensor)
    expect("coalesced all_reduce", torch.cat(tensors), [4, 4, 8, 8, 8])
    gathered = [torch.zeros(4), torch.zeros(8)]
    with manager(async_ops=True) as batched:
        for size, out in enumerate(gathered, 1):
            dist.all_gather_into_tensor(out, torch.full((size,), float(rank())))
    batched.wait()
    expect("coalesced all_gather", torch.cat(gathered), [0, 1, 2, 3, 0, 0, 1, 1, 2, 2, 3, 3])
    scattered = [torch.zeros(1), torch.zeros(2)]
    with manager(async_ops=True) as batched:
        for size, out in enumerate(scattered, 1):
            dist.reduce_scatter_tensor(out, torch.arange(4.0).repeat_interleave(size))
    batched.wait()
    expect("coalesced reduce_scatter", torch.cat(scattered), 4.0 * rank())


def in_a_group(pg: dist.ProcessGroup) -> None:
    """Ranks of a group: the peer may be named by its rank in the world or in the group."""
    tensor = torch.zeros(1)
    if rank() == 1:
        dist.send(torch.ones(1), 3, group=pg)
        dist.recv(tensor, group=pg, group_src=1)
    else:
        say("in a group from", dist.recv(tensor, 1, group=pg))
        dist.send(torch.ones(1), group=pg, group_dst=0)
    expect("in a group", tensor, 1)
    if rank() == 1:
        dist.send(tensor, 3, group=pg)
    else:
        say("in a group from any", dist.recv(tensor, group=pg))


main()
