"""Jobs that hang or break, each by one fault that its argument names; the last rank is the odd one."""

from __future__ import annotations

import os
import signal
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist


def main(fault: str, timeout_s: str = "600") -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=float(timeout_s)))
    odd = dist.get_rank() == dist.get_world_size() - 1
    dist.all_reduce(torch.ones(4))
    globals()[fault](odd)
    dist.barrier()
    dist.destroy_process_group()


def none(odd: bool) -> None:
    train(steps=3)


def swapped(odd: bool) -> None:
    """Each rank sends to its neighbour before it receives from it."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    dist.send(torch.ones(1 << 20), (rank + 1) % world_size)
    dist.recv(torch.empty(1 << 20), (rank - 1) % world_size)


def conditional(odd: bool) -> None:
    """A metric is reduced by all but one rank."""
    train(steps=2)
    if not odd:
        report_metric()
    train(steps=1)


def report_metric() -> None:
    dist.all_reduce(torch.ones(1), op=dist.ReduceOp.MAX)


def shapes(odd: bool) -> None:
    """One rank's batch is short, and so is what it gathers."""
    train(steps=1)
    size = 3 if odd else 4
    out = torch.empty(size * dist.get_world_size())
    dist.all_gather_into_tensor(out, torch.ones(size))


def skips(odd: bool) -> None:
    """One rank has a batch less than the others."""
    for batch in range(4):
        if odd and batch == 2:
            continue
        one_batch()


def one_batch() -> None:
    dist.all_reduce(torch.ones(8))


def crashes(odd: bool) -> None:
    train(steps=2)
    if odd:
        load_batch()
    train(steps=1)


def load_batch() -> None:
    raise ValueError("sample 17 has no label")


def killed(odd: bool) -> None:
    """As by the system when memory runs out."""
    train(steps=2)
    if odd:
        os.kill(os.getpid(), signal.SIGKILL)
    train(steps=1)


def stuck(odd: bool) -> None:
    """One rank never comes back from its own work."""
    train(steps=2)
    if odd:
        read_from_disk()
    train(steps=1)


def read_from_disk() -> None:
    time.sleep(600)


def pipeline(odd: bool) -> None:
    """The last stage waits for its predecessor, which waits for its own, and the first is in a reduction
    that the last never makes."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        dist.all_reduce(torch.ones(2))
    else:
        dist.recv(torch.empty(2), rank - 1)
    if rank + 1 < world_size:
        dist.send(torch.ones(2), rank + 1)


def train(steps: int) -> None:
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        model(torch.ones(1, 4)).sum().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main(*sys.argv[1:])
