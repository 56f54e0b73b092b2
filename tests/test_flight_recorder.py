"""Flight Recorder dumps: torch's own, and dumps made by hand with what torch's would have."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import CliResult, RunCli

from ranklens_core.diagnose import diagnose
from ranklens_core.diagnose.findings import Status
from ranklens_core.diagnose.flight_dump import read_dump
from ranklens_core.errors import TraceDamagedError, TraceFormatError, TraceNotFoundError, TraceVersionError

FRAMES = [
    {"name": "all_reduce", "filename": "/env/site-packages/torch/distributed/distributed_c10d.py", "line": 1},
    {"name": "step", "filename": "/env/site-packages/megatron/optimizer.py", "line": 30},
    {"name": "main", "filename": "/job/train.py", "line": 12},
]


class Rank:
    """The dump of one rank of a job of ``world_size``, as NCCL's group would write it."""

    def __init__(self, world_size: int, **groups: list[int]) -> None:
        config = {"0": {"name": "0", "desc": "default_pg", "ranks": str(list(range(world_size)))}}
        for name, ranks in groups.items():
            config[name] = {"name": name, "desc": "undefined", "ranks": str(ranks)}
        self.dump: dict[str, Any] = {"version": "2.10", "pg_config": config, "entries": []}

    def call(self, name: str, seq_id: int, state: str = "completed", group: str = "0", **more: Any) -> Rank:
        """A call that was made; ``more`` are fields of the entry."""
        entries = self.dump["entries"]
        is_p2p = name.startswith(("send", "recv"))
        entry = {
            "frames": FRAMES,
            "record_id": len(entries),
            "pg_id": 0,
            "process_group": (group, "default_pg" if group == "0" else "undefined"),
            "collective_seq_id": 0 if is_p2p else seq_id,
            "p2p_seq_id": seq_id if is_p2p else 0,
            "op_id": len(entries) + 1,
            "profiling_name": f"nccl:{name}",
            "time_created_ns": 1000 * (len(entries) + 1),
            "duration_ms": 0.25,
            "input_sizes": ((4, 2),),
            "input_dtypes": ["Float"],
            "output_sizes": ((4, 2),),
            "output_dtypes": ["Float"],
            "state": state,
            "time_discovered_started_ns": None,
            "time_discovered_completed_ns": None,
            "retired": state == "completed",
            "timeout_ms": 600000,
            "is_p2p": is_p2p,
        }
        entries.append(entry | more)
        return self


def write(directory: Path, *ranks: Rank, as_json: bool = False) -> Path:
    """The dumps as the watchdog names them; returns ``directory``."""
    for rank, made in enumerate(ranks):
        path = directory / f"nccl_trace_rank_{rank}"
        path.write_bytes(json.dumps(made.dump).encode() if as_json else pickle.dumps(made.dump, 2))
    return directory


@pytest.mark.parametrize("as_json", [False, True])
def test_a_rank_that_is_one_collective_behind(tmp_path: Path, as_json: bool) -> None:
    ranks = [Rank(4).call("all_reduce", 1).call("all_reduce", 2, "started") for _ in range(3)]
    found = diagnose(write(tmp_path, *ranks, Rank(4).call("all_reduce", 1), as_json=as_json))
    assert (found.source, found.world_size) == ("flight-recorder", 4)
    assert (found.status, found.exit_status, found.culprits) == (Status.HANG, 3, (3,))
    (wait,) = found.waits
    assert (wait.ranks, wait.for_ranks, wait.certain) == ((0, 1, 2), (3,), True)
    assert (wait.call.call, wait.call.site) == (
        "all_reduce float32[4, 2] on (ranks 0-3)",
        "/job/train.py:12 main",
    )
    assert wait.call.through == "/env/site-packages/megatron/optimizer.py:30 step"


def test_another_call(tmp_path: Path) -> None:
    ranks = [Rank(3).call("all_reduce", 7, "started") for _ in range(2)]
    found = diagnose(write(tmp_path, *ranks, Rank(3).call("_all_gather_base", 7, "started")))
    assert (found.status, found.culprits) == (Status.STRUCTURE, (2,))
    fields = (("op", "all_reduce on ranks 0,1; all_gather_into_tensor on rank 2"),)
    assert found.disagreements[0].fields == fields


def test_both_receive_first(tmp_path: Path) -> None:
    """Messages of a group of its own: a dump names group ranks, we global ones."""
    ranks = [Rank(4, pp=[1, 3]) for _ in range(4)]
    ranks[1].call("recv 0<-1", 1, "started", "pp")
    ranks[3].call("recv 1<-0", 1, "started", "pp")
    found = diagnose(write(tmp_path, *ranks))
    assert (found.status, found.cycle) == (Status.HANG, (1, 3))
    assert found.answer.startswith("deadlock: ranks 1,3 wait for each other")


def test_a_ring_buffer_that_lost_its_first_messages(tmp_path: Path) -> None:
    """Rank 0's buffer has its last two sends, rank 1's its last four receives: all of them met."""
    sender, receiver = Rank(2), Rank(2)
    for seq_id in range(1, 5):
        receiver.call("recv 1<-0", seq_id, record_id=100 + seq_id)
    for seq_id in range(3, 5):
        sender.call("send 0->1", seq_id, record_id=100 + seq_id)
    receiver.call("recv 1<-0", 5, "started", record_id=105)
    found = diagnose(write(tmp_path, sender, receiver))
    assert found.culprits == (0,)
    assert [(wait.ranks, wait.for_ranks, wait.reason) for wait in found.waits] == [
        ((1,), (0,), "did not send")
    ]


def test_a_coalesced_batch_is_one_call(tmp_path: Path) -> None:
    ranks = [
        Rank(2)
        .call("_all_gather_base", 1)
        .call("_all_gather_base", 1)
        .call("coalesced", 1)
        .call("all_reduce", 2)
        for _ in range(2)
    ]
    assert diagnose(write(tmp_path, *ranks)).status is Status.OK


def test_ranks_without_a_dump(tmp_path: Path) -> None:
    found = diagnose(write(tmp_path, *(Rank(3).call("all_reduce", 1, "started") for _ in range(2))))
    assert found.culprits == (2,)
    assert found.ends[2].how == "not recorded"


class _Payload:
    """A pickle that makes a directory when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
        return os.mkdir, (str(self.path),)


def test_nothing_in_a_pickle_is_run(tmp_path: Path) -> None:
    made = tmp_path / "made"
    file = tmp_path / "dump_rank_0"
    file.write_bytes(pickle.dumps({"version": "2.10", "entries": [_Payload(made)]}))
    with pytest.raises(TraceDamagedError, match=r"mkdir.*Nothing in it was run"):
        read_dump(file)
    assert not made.exists()


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (b"\x80\x02}q", TraceDamagedError),
        (b"{not json", TraceDamagedError),
        (pickle.dumps([1, 2]), TraceFormatError),
        (pickle.dumps({"entries": []}), TraceFormatError),
        (pickle.dumps({"version": "1.5", "entries": []}), TraceVersionError),
        (pickle.dumps({"version": "2.1", "entries": [{"state": 3}]}), TraceDamagedError),
    ],
)
def test_dumps_that_are_none(tmp_path: Path, content: bytes, error: type[Exception]) -> None:
    file = tmp_path / "dump_rank_0"
    file.write_bytes(content)
    with pytest.raises(error):
        diagnose(file)


def test_one_bad_dump_among_good_ones(tmp_path: Path) -> None:
    write(tmp_path, *(Rank(3).call("all_reduce", 1) for _ in range(3)))
    (tmp_path / "nccl_trace_rank_1").write_bytes(b"\x80\x02}q")
    found = diagnose(tmp_path)
    assert (found.status, found.ends[1].how) == (Status.CUT_OFF, "unreadable")


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(TraceNotFoundError, match="neither a trace nor Flight Recorder dumps"):
        diagnose(tmp_path)


JOB = """
import os, sys, time, torch, torch.distributed as dist
from torch._C import _distributed_c10d as c10d
dist.init_process_group("gloo")
rank = dist.get_rank()
dist.all_reduce(torch.ones(4))
if rank == 2:
    dist.broadcast(torch.ones(3), 0, async_op=True)
else:
    dist.all_reduce(torch.ones(3), async_op=True)
dump = c10d._dump_fr_trace_json if sys.argv[1] == "json" else c10d._dump_fr_trace
with open(f"fr_rank_{rank}", "wb") as file:
    file.write(dump())
time.sleep(0.5)  # until the others have dumped too: a lost peer makes gloo retire a call
os._exit(0)
"""


@pytest.mark.parametrize("form", ["pickle", "json"])
def test_what_torch_dumps(tmp_path: Path, run_cli: RunCli, form: str) -> None:
    """A real job: RankLens starts its ranks, torch dumps, torch's file is read."""
    (tmp_path / "job.py").write_text(JOB)
    result: CliResult = run_cli(
        "record", "--nproc", "3", "--", "job.py", form, env={"TORCH_FR_BUFFER_SIZE": "100"}
    )
    dumps = tmp_path / "dumps"
    dumps.mkdir()
    for rank in range(3):
        (tmp_path / f"fr_rank_{rank}").rename(dumps / f"fr_rank_{rank}")
    result = run_cli("diagnose", dumps)
    assert result.returncode == 3
    assert result.stdout.startswith("Rank 2 made broadcast float32[3] on (ranks 0-2)")
    assert "where ranks 0,1 made all_reduce float32[3]" in result.stdout
