"""Profiles its third step with torch.profiler: compute, blocking, asynchronous and point-to-point calls."""

import contextlib
import os
import time

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

dist.init_process_group("gloo")
rank = dist.get_rank()
pair = dist.new_group([0, 1], group_desc="pair")
torch.manual_seed(0)
net = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(4):
    watch = profile(activities=[ProfilerActivity.CPU], record_shapes=True) if step == 2 else None
    with watch or contextlib.nullcontext():
        batch = torch.full((8, 64), float(rank))
        loss = net(batch).pow(2).mean()
        loss.backward()
        if rank == 0:
            time.sleep(0.05)  # rank 1 waits for it, on however busy a machine
        work = dist.all_reduce(net.weight.grad, group=pair, async_op=True)
        work.wait()
        dist.all_reduce(net.bias.grad)
        if rank == 0:
            time.sleep(0.05)  # here too
            dist.send(batch, 1)
        else:
            dist.recv(batch, 0)
        optimizer.step()
        optimizer.zero_grad()
    if watch is not None:
        watch.export_chrome_trace(os.environ["TRACE"] + f"-{rank}.json")
dist.destroy_process_group()
