"""Collectives that fail on their own: the program sees gloo's error, and goes on with another group."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from showing import expect, rank, say

SOON = timedelta(milliseconds=300)


def main() -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    groups = [dist.new_group() for _ in range(3)]
    for pg in groups:
        dist.distributed_c10d._set_pg_timeout(SOON, pg)
    lonely(groups[0], is_async=False)
    lonely(groups[1], is_async=True)
    silent(groups[2])
    refused("reduce op", lambda: dist.all_reduce(torch.ones(2), dist._make_nccl_premul_sum(2.0)))
    refused("shapes", lambda: dist.all_gather([torch.ones(1), torch.ones(3)], torch.ones(2)))
    refused("dtype", lambda: dist.all_reduce(torch.ones(2, dtype=torch.complex32)))
    refused("time", lambda: dist.barrier(async_op=True).wait(timedelta(seconds=20)))
    tensor = torch.tensor([rank() + 1.0])
    dist.all_reduce(tensor)
    expect("afterwards", tensor, 3)


def refused(name: str, call: Callable[[], object]) -> None:
    try:
        call()
    except Exception as error:
        # up to the text that differs from run to run: addresses, ports, stacks
        say(name, f"{type(error).__name__}: {str(error).splitlines()[0].partition(' [')[0][:90]}")
    else:
        say(name, "no error")


def lonely(pg: dist.ProcessGroup, is_async: bool) -> None:
    """Rank 0 calls, rank 1 never does: gloo gives up."""
    if rank() == 1:
        return
    tensor = torch.ones(4)
    work = None

    def call() -> None:
        nonlocal work
        work = dist.all_reduce(tensor, group=pg, async_op=is_async)
        if work is not None:
            say("issued", "the error comes later")
            work.wait()

    refused(f"lonely {'async' if is_async else 'sync'}", call)
    if work is not None:
        refused("lonely again", work.wait)
        refused("lonely future", work.get_future().wait)


def silent(pg: dist.ProcessGroup) -> None:
    """Rank 0 receives what rank 1 never sends."""
    if rank() == 1:
        return
    refused("silent sync", lambda: dist.recv(torch.ones(4), 1, group=pg))


main()
