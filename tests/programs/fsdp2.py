"""A small transformer-like network under FSDP2 (fully_shard): parameters gathered, gradients scattered."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

STEPS = int(os.environ.get("STEPS", 3))
WIDTH = 32


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.up = torch.nn.Linear(WIDTH, 4 * WIDTH)
        self.down = torch.nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(11)
    net = torch.nn.Sequential(torch.nn.Embedding(50, WIDTH), Block(), Block(), torch.nn.Linear(WIDTH, 50))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in (net[1], net[2], net):
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, foreach=False)
    data = torch.Generator().manual_seed(100 + rank)
    for step in range(STEPS):
        tokens = torch.randint(0, 50, (4, 9), generator=data)
        logits = net(tokens[:, :-1].flatten()).float()
        loss = torch.nn.functional.cross_entropy(logits, tokens[:, 1:].flatten())
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0, foreach=False).full_tensor()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        mean /= dist.get_world_size()
        print(f"rank {rank} step {step} loss {float(mean):.9f} grad_norm {float(norm):.9f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


main()
