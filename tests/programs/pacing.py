"""Rank 0 is ready after 40 ms a step, rank 1 after 65; OWN_MS is this rank's own, another time."""

import os
import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
own_s = float(os.environ.get("OWN_MS") or (40, 65)[dist.get_rank()]) / 1e3
net = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(8):
    net(torch.ones(2, 8)).sum().backward()
    time.sleep(own_s)
    dist.all_reduce(net.weight.grad)
    optimizer.step()
dist.destroy_process_group()
