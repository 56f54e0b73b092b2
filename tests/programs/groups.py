"""Process groups of every origin, and a second world after the first."""

from __future__ import annotations

import os
import warnings

import torch
import torch.distributed as dist
from showing import expect, rank, say
from torch.distributed.device_mesh import init_device_mesh


def main() -> None:
    dist.init_process_group("gloo")
    total("world", None, 10)
    twins()
    parts()
    locally()
    subgroups()
    mesh()
    split()
    dist.destroy_process_group()

    # another world: its groups have the first world's names
    os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1)
    assert not dist.is_initialized()
    dist.init_process_group("gloo")
    total("second world", None, 10)
    dist.destroy_process_group()


def total(name: str, pg: dist.ProcessGroup | None, wanted: float) -> None:
    """Sum of rank + 1 over the group."""
    tensor = torch.tensor([rank() + 1.0])
    dist.all_reduce(tensor, group=pg)
    expect(name, tensor, wanted)
    say(f"{name} place", f"{dist.get_rank(pg)} of {dist.get_world_size(pg)}, {dist.get_backend(pg)}")


def twins() -> None:
    """Groups of the very same ranks are different groups."""
    first, second, third = (dist.new_group(group_desc=f"twin {number}") for number in range(3))
    total("third", third, 10)
    total("first", first, 10)
    dist.destroy_process_group(second)
    total("first again", first, 10)
    fourth = dist.new_group()
    total("fourth", fourth, 10)
    say("twins", [first.group_desc, third.group_desc])


def parts() -> None:
    """Every rank makes all groups, and is not in all of them."""
    evens, odds = dist.new_group([0, 2]), dist.new_group([1, 3])
    mine, other = (evens, odds) if rank() % 2 == 0 else (odds, evens)
    say("not mine", other is dist.GroupMember.NON_GROUP_MEMBER)
    total("part", mine, 4 if rank() % 2 == 0 else 6)
    tensor = torch.ones(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        dist.all_reduce(tensor, group=other)
    expect("untouched", tensor, 1)
    backwards = dist.new_group([3, 2, 1, 0])
    total("backwards", backwards, 10)
    dist.barrier(mine)


def locally() -> None:
    """Only the members make the group."""
    if rank() in (1, 2):
        total("local", dist.new_group([1, 2], use_local_synchronization=True), 5)
    lonely = dist.new_group([rank()], use_local_synchronization=True)
    total("alone", lonely, rank() + 1)


def subgroups() -> None:
    mine, every = dist.new_subgroups(2)
    total("subgroup", mine, 3 if rank() < 2 else 7)
    say("subgroups", len(every))
    mine, _ = dist.new_subgroups_by_enumeration([[0, 3], [1, 2]])
    total("enumerated", mine, 5)


def mesh() -> None:
    device_mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    total("mesh dp", device_mesh["dp"].get_group(), 4 if rank() % 2 == 0 else 6)
    total("mesh tp", device_mesh.get_group("tp"), 3 if rank() < 2 else 7)
    say("mesh coordinate", device_mesh.get_coordinate())
    total("mesh flat", device_mesh._flatten().get_group(), 10)


def split() -> None:
    """gloo may refuse to split a group; then a replay refuses as well."""
    try:
        part = dist.split_group(split_ranks=[[0, 1], [2, 3]])
    except Exception as error:
        say("split", f"{type(error).__name__}: {error}")
        return
    total("split", part, 3 if rank() < 2 else 7)


main()
