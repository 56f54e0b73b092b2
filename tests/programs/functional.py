"""Functional collectives, waited for when a result is first used, and the differentiable ones."""

from __future__ import annotations

import warnings

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed.nn.functional as nnf
from showing import expect, rank, say, show


def main() -> None:
    # torch's newer names for some of these are not in the oldest torch we support
    warnings.simplefilter("ignore", FutureWarning)
    dist.init_process_group("gloo")
    world = list(range(4))
    own = torch.full((4,), rank() + 1.0)

    total = funcol.all_reduce(own, "sum", world)
    say("all_reduce is", type(total).__name__)
    expect("all_reduce", total + 0, 10)
    expect("input untouched", own, rank() + 1)
    # used by a view before it is waited for
    expect("view", funcol.all_reduce(own, "max", world)[:2].clone(), 4)
    gathered = funcol.all_gather_tensor(own[:1], 0, world)
    expect("all_gather_tensor", funcol.wait_tensor(gathered), [1, 2, 3, 4])
    scattered = funcol.reduce_scatter_tensor(own, "sum", 0, world)
    expect("reduce_scatter_tensor", scattered + 0, 10)
    expect("broadcast", funcol.broadcast(own, 2, world) + 0, 3)
    exchanged = funcol.all_to_all_single(torch.arange(4.0) + 10 * rank(), None, None, world)
    expect("all_to_all_single", exchanged + 0, [peer * 10 + rank() for peer in world])
    for number, part in enumerate(funcol.all_reduce_coalesced([own, own[:2] * 2], "sum", world)):
        expect(f"all_reduce_coalesced {number}", part + 0, 10 * (number + 1))
    for number, part in enumerate(funcol.all_gather_into_tensor_coalesced([own[:1], own[:2]], world)):
        show(f"all_gather_into_tensor_coalesced {number}", part + 0)
    parts = funcol.reduce_scatter_tensor_coalesced([own, own * 2], "sum", [0, 0], world)
    for number, part in enumerate(parts):
        expect(f"reduce_scatter_tensor_coalesced {number}", part + 0, 10 * (number + 1))
    differentiable(world)
    unused = funcol.all_reduce(own, "sum", world)
    del unused
    dist.barrier()
    dist.destroy_process_group()


def differentiable(world: list[int]) -> None:
    leaf = torch.full((2,), rank() + 1.0, requires_grad=True)
    gathered = funcol.all_gather_tensor_autograd(leaf, 0, world)
    (gathered * torch.arange(8.0)).sum().backward()
    show("all_gather_tensor_autograd", *gradient(leaf))
    leaf = torch.arange(8.0, requires_grad=True)
    (funcol.reduce_scatter_tensor_autograd(leaf, "sum", 0, world) * (rank() + 1)).sum().backward()
    show("reduce_scatter_tensor_autograd", *gradient(leaf))
    leaf = torch.arange(4.0, requires_grad=True)
    (funcol.all_to_all_single_autograd(leaf, [1] * 4, [1] * 4, world) * (rank() + 1)).sum().backward()
    expect("all_to_all_single_autograd", *gradient(leaf), [1.0, 2.0, 3.0, 4.0])
    # not left to the default, which is the group of the moment when torch imports that module
    group = dist.group.WORLD
    leaf = torch.full((2,), rank() + 1.0, requires_grad=True)
    (nnf.all_reduce(leaf, group=group) * (rank() + 1)).sum().backward()
    expect("nn all_reduce", *gradient(leaf), 10)
    leaf = torch.full((2,), rank() + 1.0, requires_grad=True)
    torch.stack(nnf.all_gather(leaf, group)).mul(rank() + 1).sum().backward()
    show("nn all_gather", *gradient(leaf))


def gradient(leaf: torch.Tensor) -> list[torch.Tensor]:
    return [] if leaf.grad is None else [leaf.grad]


main()
