"""Collectives that fail on their own: the program sees gloo's error, and copes with it."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from showing import expect, rank, say

SOON = timedelta(milliseconds=300)


def main() -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    groups = [dist.new_group() for _ in range(6)]
    for pg in groups:
        dist.distributed_c10d._set_pg_timeout(SOON, pg)
    attempt("reduce op", lambda: dist.all_reduce(torch.ones(2), dist._make_nccl_premul_sum(2.0)))
    attempt("shapes", lambda: dist.all_gather([torch.ones(1), torch.ones(3)], torch.ones(2)))
    limited()
    tensor = torch.tensor([rank() + 1.0])
    dist.all_reduce(tensor)
    expect("afterwards", tensor, 3)
    # from here on each rank is alone: gloo closes all connections of a pair after the first timeout
    lonely("sync", groups[rank()], is_async=False)
    lonely("async", groups[rank()], is_async=True)
    never = dist.irecv(torch.ones(4), 1 - rank(), group=groups[3])
    say("receive in vain", never.is_completed())
    # for these two torch waits in C++, where the handle that RankLens gives cannot raise
    mine = groups[4 + rank()]
    attempt("functional", lambda: funcol.wait_tensor(funcol.all_reduce(torch.ones(4), "sum", mine)))
    attempt("coalesced handle", lambda: dist._broadcast_coalesced(mine, [torch.ones(4)], 1024, 0))
    attempt("next", lambda: dist.all_reduce(torch.ones(1), group=mine))


def attempt(name: str, call: Callable[[], object]) -> None:
    try:
        call()
    except Exception as error:
        # which end notices first differs from run to run, not between a recording and its replay
        say(f"{name} handle", str(error).splitlines()[0])
        say(name, f"{type(error).__name__}")
    else:
        say(name, "no error")


def limited() -> None:
    """A wait with a limit that is long enough, and one that is not."""
    work = dist.barrier(async_op=True)
    attempt("wait in time", lambda: work.wait(timedelta(seconds=20)))
    tensor = torch.zeros(1)
    if rank() == 0:
        work = dist.irecv(tensor, 1)
        dist.send(torch.ones(1), 1)
        attempt("recv in time", lambda: work.wait(timedelta(seconds=20)))
    else:
        dist.recv(tensor, 0)
        dist.send(torch.ones(1), 0)
    expect("received", tensor, 1)


def lonely(name: str, pg: dist.ProcessGroup, is_async: bool) -> None:
    """The other rank never calls: gloo gives up."""
    work: dist.Work | None = None

    def call() -> None:
        nonlocal work
        work = dist.all_reduce(torch.ones(4), group=pg, async_op=is_async)
        if work is not None:
            say(name, "issued, the error comes later")
            work.wait()

    attempt(name, call)
    if work is not None:
        attempt(f"{name} again", work.wait)
        attempt(f"{name} future", work.get_future().wait)


main()
