"""The DDP reducer: many buckets, unused parameters, buffers, and a communication hook."""

from __future__ import annotations

import torch
import torch.distributed as dist
from showing import rank, say, show
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(8, 16)
        self.norm = torch.nn.BatchNorm1d(16)
        self.branches = torch.nn.ModuleList([torch.nn.Linear(16, 4) for _ in range(2)])

    def forward(self, x: torch.Tensor, branch: int) -> torch.Tensor:
        return self.branches[branch](self.norm(torch.tanh(self.first(x))))


def main() -> None:
    dist.init_process_group("gloo")
    train("plain", hook=False, unused=False)
    train("unused", hook=False, unused=True)
    train("hook", hook=True, unused=False)
    dist.destroy_process_group()


def train(name: str, hook: bool, unused: bool) -> None:
    torch.manual_seed(7)
    net = DistributedDataParallel(
        Net(), bucket_cap_mb=0.0005, find_unused_parameters=True, gradient_as_bucket_view=hook
    )
    if hook:
        net.register_comm_hook(None, default_hooks.fp16_compress_hook)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    data = torch.Generator().manual_seed(100 + rank())
    for step in range(2):
        with net.no_sync():
            net(torch.randn(4, 8, generator=data), 0).sum().backward()
        branch = (rank() + step) % 2 if unused else 1
        loss = net(torch.randn(4, 8, generator=data), branch).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        say(f"{name} after step {step}", f"{float(loss.detach()):.9f}")
    show(name, *net.parameters(), *net.buffers())


main()
