"""Tensor parallelism with DTensor on a 2x2 mesh: column- and row-wise layers, sequence parallelism."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

STEPS = int(os.environ.get("STEPS", 3))
WIDTH = 16


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.up = torch.nn.Linear(WIDTH, 4 * WIDTH)
        self.down = torch.nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(self.norm(x))))


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mesh = dist.init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(3)
    net = parallelize_module(
        Net(),
        mesh["tp"],
        {
            "norm": SequenceParallel(),
            "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(output_layouts=Replicate()),
            "": PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(1)),
        },
    )
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, foreach=False)
    data = torch.Generator().manual_seed(100 + mesh["dp"].get_local_rank())
    for step in range(STEPS):
        x = torch.randn(4, 8, WIDTH, generator=data)
        loss = (net(x) - x.flip(-1)).pow(2).mean()
        loss.backward()
        for parameter in net.parameters():
            assert isinstance(parameter.grad, DTensor)
            dist.all_reduce(parameter.grad.to_local(), dist.ReduceOp.SUM, group=mesh["dp"].get_group())
        norm = torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0, foreach=False)
        total = norm.full_tensor() if isinstance(norm, DTensor) else norm
        optimizer.step()
        optimizer.zero_grad()
        print(
            f"rank {rank} step {step} loss {float(loss.detach()):.9f} grad_norm {float(total):.9f}",
            flush=True,
        )

    # from one layout to another, and a partial sum made whole
    whole = torch.arange(64.0).view(8, 8)
    sharded = distribute_tensor(whole, mesh, [Shard(0), Shard(1)])
    assert torch.equal(sharded.redistribute(mesh, [Shard(1), Replicate()]).full_tensor(), whole)
    product = sharded.redistribute(mesh, [Replicate(), Shard(1)]) @ sharded.redistribute(
        mesh, [Replicate(), Shard(0)]
    )
    assert torch.equal(product.full_tensor(), whole @ whole)
    dist.destroy_process_group()


main()
