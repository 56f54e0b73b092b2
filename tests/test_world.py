"""A world of one process: groups with the real job's ranks and names, a store without peers."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.distributed.device_mesh import init_device_mesh

from ranklens_core.c10d.groups import Groups, ranks_text
from ranklens_core.c10d.store import OneRankStore
from ranklens_core.c10d.world import OneRankWorld
from ranklens_core.errors import UsageError
from ranklens_core.schema import GroupRecord

# what torch says of it where it is built without NCCL
pytestmark = pytest.mark.filterwarnings(
    "ignore:Attempted to get default timeout for nccl backend:UserWarning"
)


@pytest.fixture
def world() -> Iterator[OneRankWorld]:
    """Rank 5 of 8; nobody else is there."""
    made = OneRankWorld(5, 8)
    yield made
    if dist.is_initialized():
        dist.destroy_process_group()
    made.remove()


@pytest.mark.parametrize("backend", ["gloo", "nccl", "cpu:gloo,cuda:nccl"])
def test_default_group_looks_like_the_jobs(world: OneRankWorld, backend: str) -> None:
    dist.init_process_group(backend)
    assert dist.get_rank() == 5
    assert dist.get_world_size() == 8
    assert dist.get_backend() == backend
    assert dist.get_process_group_ranks(dist.group.WORLD) == list(range(8))
    assert dist.is_initialized()
    group = dist.group.WORLD
    assert isinstance(group, dist.ProcessGroup)
    assert (group.rank(), group.size()) == (5, 8)


@pytest.mark.parametrize(
    "arguments",
    [
        {"init_method": "env://"},
        {"init_method": "tcp://10.0.0.1:29500", "rank": 5, "world_size": 8},
        {"rank": 5, "world_size": 8, "timeout": timedelta(seconds=7)},
        {"group_name": "", "pg_options": None},
    ],
)
def test_ways_to_initialise(world: OneRankWorld, arguments: dict[str, object]) -> None:
    dist.init_process_group("gloo", **arguments)  # type: ignore[arg-type]
    assert (dist.get_rank(), dist.get_world_size()) == (5, 8)


def test_store_that_the_program_makes(world: OneRankWorld, tmp_path: Path) -> None:
    store = dist.TCPStore("10.0.0.1", 29500, 8, False, timeout=timedelta(seconds=9))
    assert isinstance(store, dist.TCPStore)
    dist.init_process_group("gloo", store=store, rank=5, world_size=8)
    del store
    gc.collect()
    c10d._get_default_store().set("key", "kept though the program dropped it")
    assert isinstance(dist.FileStore(str(tmp_path / "store"), 8), dist.FileStore)
    assert not (tmp_path / "store").exists()


def test_another_rank_than_the_replayed_is_refused(world: OneRankWorld) -> None:
    with pytest.raises(UsageError, match=r"rank=0, world_size=8\), but this run is rank 5 of 8"):
        dist.init_process_group("gloo", store=OneRankStore(), rank=0, world_size=8)


def test_subgroups(world: OneRankWorld) -> None:
    dist.init_process_group("gloo")
    mine = dist.new_group([1, 5, 7], backend="nccl", group_desc="tp")
    assert (dist.get_rank(mine), dist.get_world_size(mine)) == (1, 3)
    assert dist.get_backend(mine) == "nccl"
    assert mine.group_desc == "tp"
    assert dist.get_group_rank(mine, 7) == 2
    assert dist.new_group([0, 1]) is dist.GroupMember.NON_GROUP_MEMBER
    assert dist.get_world_size(dist.new_group([5, 6], use_local_synchronization=True)) == 2
    assert dist.get_world_size(dist.new_group()) == 8
    own, every = dist.new_subgroups(4)
    assert (dist.get_process_group_ranks(own), len(every)) == ([4, 5, 6, 7], 2)
    dist.destroy_process_group(mine)
    with pytest.raises(ValueError, match="world group map"):
        dist.get_backend(mine)


def test_device_mesh(world: OneRankWorld) -> None:
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "pp", "tp"))
    assert list(mesh.get_coordinate() or ()) == [1, 0, 1]
    assert dist.get_process_group_ranks(mesh["tp"].get_group()) == [4, 5]
    assert dist.get_process_group_ranks(mesh["dp"].get_group()) == [1, 5]
    assert dist.get_process_group_ranks(mesh["dp", "tp"]._flatten().get_group()) == [0, 1, 4, 5]


def test_split_group(world: OneRankWorld) -> None:
    dist.init_process_group("nccl")
    with pytest.raises(RuntimeError, match="No device associated with the default pg"):
        dist.split_group(split_ranks=[[0, 1, 2, 3], [4, 5, 6, 7]])
    c10d._get_default_group().bound_device_id = torch.device("cuda:1")
    part = dist.split_group(split_ranks=[[0, 1, 2, 3], [7, 6, 5, 4]], group_desc="half")
    assert isinstance(part, dist.ProcessGroup)
    assert dist.get_process_group_ranks(part) == [4, 5, 6, 7]
    assert (part.group_desc, dist.get_backend(part)) == ("half", "nccl")
    # ranks of the parent, not of the world
    quarter = dist.split_group(part, [[0, 1], [2, 3]])
    assert dist.get_process_group_ranks(quarter) == [4, 5]
    assert dist.split_group(split_ranks=[[0, 1]]) is None
    with pytest.raises(ValueError, match="cannot be None or empty"):
        dist.split_group(split_ranks=[])


def test_what_needs_no_peer_is_accepted(world: OneRankWorld) -> None:
    dist.init_process_group("gloo", timeout=timedelta(minutes=3))
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=1), dist.group.WORLD)
    store = c10d._get_default_store()
    store.set("key", "value")
    assert store.get("key") == b"value"
    dist.destroy_process_group()
    dist.init_process_group("gloo")
    assert dist.get_rank() == 5


def test_removing_gives_torch_its_own_back() -> None:
    names = [(dist, "TCPStore"), (dist, "split_group"), (c10d, "rendezvous"), (c10d, "_store_based_barrier")]
    before = [getattr(module, name) for module, name in names]
    world = OneRankWorld(0, 2)
    assert all(getattr(m, n) is not old for (m, n), old in zip(names, before, strict=True))
    world.remove()
    world.remove()
    assert all(getattr(m, n) is old for (m, n), old in zip(names, before, strict=True))


def test_too_late() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(UsageError, match="must begin before the program's init_process_group"):
            OneRankWorld(0, 1)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([0], "0"),
        ([0, 1], "0,1"),
        ([0, 1, 2], "0-2"),
        ([0, 1, 2, 3, 8, 10], "0-3,8,10"),
        ([5, 6, 7, 2, 3], "5-7,2,3"),
        ([], ""),
    ],
)
def test_ranks_in_short(ranks: list[int], text: str) -> None:
    assert ranks_text(ranks) == text


def test_groups_are_named_in_the_order_they_were_made(world: OneRankWorld) -> None:
    told: list[GroupRecord] = []
    groups = Groups(told.append)
    try:
        dist.init_process_group("gloo")
        first, second = dist.new_group([4, 5], group_desc="one"), dist.new_group([4, 5])
        dropped = dist.new_group([4, 5])
        dist.destroy_process_group(dropped)
        # asked for out of order, named in order
        assert groups.record(second).key == "4,5#1"
        assert groups.record(first).key == "4,5"
        assert groups.key_of(c10d._get_default_group()) == "0-7"
        later = dist.new_group([5, 4])
        assert groups.record(later).key == "4,5#2"
        assert [group.key for group in told] == ["0-7", "4,5", "4,5#1", "4,5#2"]
        assert told[1].pg_desc == "one"
        assert told[1].backend == "gloo"
        assert told[1].ranks == (4, 5)
        dist.destroy_process_group()
        dist.init_process_group("gloo")
        # torch's names begin anew, ours go on
        assert groups.record(c10d._get_default_group()).key == "0-7#1"
    finally:
        groups.close()
    assert "RANK" not in os.environ
