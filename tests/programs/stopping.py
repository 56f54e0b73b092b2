"""Stops in pdb in step 2 if STOP is set, with an all-reduce in flight."""

import os

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
net = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(4):
    loss = net(torch.ones(2, 8)).sum()
    loss.backward()
    work = dist.all_reduce(net.weight.grad, async_op=True)
    if step == 2 and os.environ.get("STOP"):
        breakpoint()
    work.wait()
    dist.all_reduce(net.bias.grad)
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
