"""Object collectives: sizes first, then bytes, over the same operators."""

from __future__ import annotations

import torch.distributed as dist
from showing import rank, say


def main() -> None:
    dist.init_process_group("gloo")
    everything: list[object] = [None] * 4
    dist.all_gather_object(everything, {"rank": rank(), "text": "x" * rank()})
    say("all_gather_object", everything)

    gathered: list[object] | None = [None] * 4 if rank() == 1 else None
    dist.gather_object(("from", rank()), gathered, dst=1)
    say("gather_object", gathered)

    handed: list[object] = [None]
    dist.scatter_object_list(handed, [f"for {peer}" for peer in range(4)] if rank() == 2 else None, src=2)
    say("scatter_object_list", handed)

    plan: list[object] = [{"steps": 3}, [1, 2, 3], None] if rank() == 3 else [None] * 3
    dist.broadcast_object_list(plan, src=3)
    say("broadcast_object_list", plan)

    if rank() == 0:
        dist.send_object_list([1, "two", (3.0,)], 1)
    elif rank() == 1:
        received: list[object] = [None] * 3
        say("recv_object_list from", dist.recv_object_list(received, 0))
        say("recv_object_list", received)
    dist.barrier()
    dist.destroy_process_group()


main()
