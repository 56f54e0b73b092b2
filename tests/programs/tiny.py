"""A tiny tensor- and data-parallel training: gloo all-reduces by hand, every shape from the environment."""

import os
import signal
import sys
import time

import torch
import torch.distributed as dist

LAYERS = int(os.environ.get("LAYERS", 2))
WIDTH = int(os.environ.get("WIDTH", 8))
MICRO = int(os.environ.get("MICRO", 4))
STEPS = int(os.environ.get("STEPS", 4))
TP = int(os.environ.get("TP", 1))
DTYPE = getattr(torch, os.environ.get("DTYPE", "float32"))
FAIL = os.environ.get("FAIL", "")


class SumOverRanks(torch.autograd.Function):
    """All-reduce forward, identity backward: the output of a row-parallel layer."""

    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def main() -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    tensor_groups = [dist.new_group(list(range(i, i + TP))) for i in range(0, world, TP)]
    group = tensor_groups[rank // TP]
    torch.manual_seed(3)
    layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)).to(DTYPE)
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)
    data = torch.Generator().manual_seed(rank // TP)
    for step in range(STEPS):
        if FAIL == "raise" and step == 2:
            raise RuntimeError("the program's own error")
        if FAIL == "exit" and step == 2:
            sys.exit(7)
        if FAIL == "kill" and step == 2:
            time.sleep(0.6)  # what was recorded up to here is on disk by now
            if rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
        x = torch.randn(MICRO, WIDTH, generator=data).to(DTYPE)
        for layer in layers:
            x = SumOverRanks.apply(torch.tanh(layer(x)), group)
        loss = x.float().square().mean()
        optimizer.zero_grad()
        loss.backward()
        for parameter in layers.parameters():
            dist.all_reduce(parameter.grad, op=dist.ReduceOp.SUM)
            parameter.grad /= world
        norm = torch.nn.utils.clip_grad_norm_(layers.parameters(), 1.0)
        optimizer.step()
        print(f"rank {rank} step {step} loss {loss.item():.9f} grad_norm {float(norm):.9f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


main()
