"""One rank of a job that nobody recorded: any world, made-up results with a label, estimated times."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
from conftest import RunCli

PROGRAMS = Path(__file__).parent / "programs"
MEGATRON = ("-m", "ranklens_megatron.examples.gpt")
ZERO = ("-m", "ranklens_deepspeed.examples.zero")


def emulate(run_cli: RunCli, tmp_path: Path, *args: str) -> tuple[dict[str, object], str]:
    """The verdict as JSON, and what the program printed."""
    file = tmp_path / "verdict.json"
    done = run_cli("emulate", "--verdict", str(file), *args)
    assert done.returncode == 0, done.stderr
    return json.loads(file.read_text()), done.stdout


@pytest.mark.parametrize(
    ("world", "rank", "layout"),
    [
        (256, 200, ("--tp", "8", "--pp", "4")),
        (1024, 0, ("--tp", "8", "--pp", "4")),
        (8, 5, ("--tp", "1", "--ep", "2")),
    ],
    ids=["256", "1024", "experts"],
)
def test_megatron_at_sizes_nobody_has_here(
    run_cli: RunCli, tmp_path: Path, world: int, rank: int, layout: tuple[str, ...]
) -> None:
    verdict, out = emulate(
        run_cli, tmp_path, "--world-size", str(world), "--rank", str(rank), "--network", "h100-ib400",
        "--cpu", "--", *MEGATRON, *layout, "--steps", "2",
    )  # fmt: skip
    assert (verdict["emulated"], verdict["world_size"], verdict["status"]) == (True, world, "ok")
    calls = verdict["calls"]
    assert isinstance(calls, dict)
    provenance = verdict["provenance"]
    assert isinstance(provenance, dict)
    assert provenance["result"] == {"recorded": 0, "synthesised": calls["replayed"]}
    assert provenance["time"] == {"recorded": 0, "estimated": calls["replayed"], "none": 0}
    assert sum(provenance["estimates"].values()) == calls["replayed"]
    assert all("h100-ib400" in source or source == "same rank" for source in provenance["estimates"])
    norms = [float(norm) for norm in re.findall(r"grad_norm (\S+)", out)]
    assert len(norms) == 2
    assert all(math.isfinite(norm) and norm > 0 for norm in norms)
    timing = verdict["timing"]
    assert isinstance(timing, dict)
    assert timing["estimated_pct"] == 100


def test_zero_3_believes_that_its_peers_have_the_same_parameters(run_cli: RunCli, tmp_path: Path) -> None:
    verdict, out = emulate(
        run_cli, tmp_path, "--world-size", "64", "--rank", "9", "--", *ZERO, "--stage", "3", "--steps", "2"
    )
    assert verdict["status"] == "ok"
    losses = [float(loss) for loss in re.findall(r"loss (\S+)", out)]
    assert len(losses) == 2
    assert all(map(math.isfinite, losses))
    provenance = verdict["provenance"]
    assert isinstance(provenance, dict)
    assert provenance["time"]["estimated"] == 0  # no network was named: no time is made up


def test_objects_are_what_this_rank_would_have_sent(run_cli: RunCli, tmp_path: Path) -> None:
    program = tmp_path / "objects.py"
    program.write_text(
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "rank, world = dist.get_rank(), dist.get_world_size()\n"
        "everyone = [None] * world\n"
        "dist.all_gather_object(everyone, {'rank': rank})\n"
        "print('gathered', everyone)\n"
        "mine = ['from', rank]\n"
        "dist.broadcast_object_list(mine, src=rank)\n"
        "print('mine', mine)\n"
        "other = [None]\n"
        "dist.broadcast_object_list(other, src=0)\n"
    )
    done = run_cli("emulate", "--world-size", "3", "--rank", "2", "--", str(program))
    assert "gathered [{'rank': 2}, {'rank': 2}, {'rank': 2}]" in done.stdout
    assert "mine ['from', 2]" in done.stdout
    assert done.returncode == 6
    assert (
        f"broadcast at {program}:11 <module> receives an object that another rank alone knows" in done.stderr
    )
    assert "Record the job" in done.stderr
    assert "Traceback" not in done.stderr


def test_shapes_that_only_the_stage_before_knows_are_asked_for(run_cli: RunCli, tmp_path: Path) -> None:
    program = tmp_path / "stages.py"
    program.write_text(
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "rank, world = dist.get_rank(), dist.get_world_size()\n"
        "shape = torch.tensor([4, 8])\n"
        "if rank > 0:\n"
        "    dist.recv(shape, rank - 1)\n"
        "dist.send(shape, (rank + 1) % world)\n"
        "if rank == 0:\n"
        "    dist.recv(shape, world - 1)\n"
        "print('shape', shape.tolist())\n"
    )
    first = run_cli("emulate", "--world-size", "4", "--rank", "0", "--", str(program))
    assert (first.returncode, "shape [4, 8]" in first.stdout) == (0, True), first.stderr
    middle = run_cli("emulate", "--world-size", "4", "--rank", "2", "--", str(program))
    assert middle.returncode == 6
    assert f"recv at {program}:6 <module> receives integers that another rank alone knows" in middle.stderr


def test_a_program_that_fails_over_made_up_sizes_is_told_so(run_cli: RunCli, tmp_path: Path) -> None:
    program = tmp_path / "sizes.py"
    program.write_text(
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "size = torch.tensor([0])\n"
        "dist.broadcast(size, 0)\n"
        "assert size.item() > 0, 'no rows'\n"
    )
    done = run_cli("emulate", "--world-size", "4", "--rank", "2", "--", str(program))
    assert done.returncode == 1
    assert "AssertionError: no rows (The integers of broadcast at" in done.stderr


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (("--world-size", "4", "--rank", "4"), "There is no rank 4 in a world of 4"),
        (("--world-size", "0", "--rank", "0"), "There is no rank 0 in a world of 0"),
        (("--world-size", "4", "--rank", "0", "--task", "debug"), "compares with a recording"),
        (("--world-size", "4", "--rank", "0", "--task", "nothing"), "There is no task 'nothing'"),
        (("--world-size", "4", "--rank", "0", "--network", "h1000"), "no network named 'h1000'"),
        (("--world-size", "4", "--rank", "0", "--bandwidth", "2"), "name one"),
        (("--world-size", "999", "--rank", "0", "--network", "v100"), "Name a network with a fabric"),
    ],
)
def test_what_cannot_be_emulated_is_refused_before_the_program_runs(
    run_cli: RunCli, args: tuple[str, ...], text: str
) -> None:
    done = run_cli("emulate", *args, "--", str(PROGRAMS / "tiny.py"))
    assert done.returncode == 2
    assert text in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("rank", [0, 5, 15], ids=["first", "middle", "last"])
def test_pipeline_stages_know_the_shapes_of_the_stages_before(
    run_cli: RunCli, tmp_path: Path, cases_dir: Path, rank: int
) -> None:
    file = tmp_path / "verdict.json"
    done = run_cli(
        "emulate", "--world-size", "16", "--rank", str(rank), "--network", "loopback", "--verdict", file,
        "--", cases_dir / "deepspeed_pipe.py", env={"STAGES": "4", "STEPS": "2"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r"loss (\S+)", done.stdout)]
    assert len(losses) == 2
    assert all(map(math.isfinite, losses))
    assert len(json.loads(file.read_text())["steps"]) == 2


def test_variable_sequence_lengths_of_megatron(run_cli: RunCli, tmp_path: Path, cases_dir: Path) -> None:
    program = tmp_path / "variable.py"
    source = (cases_dir / "megatron_gpt.py").read_text()
    program.write_text(
        source.replace(
            "masked_softmax_fusion=False,",
            "masked_softmax_fusion=False, variable_seq_lengths=True, moe_token_dispatcher_type='alltoall',",
        )
    )
    _, out = emulate(
        run_cli, tmp_path, "--world-size", "16", "--rank", "5", "--cpu", "--", str(program)
    )  # fmt: skip
    norms = [float(norm) for norm in re.findall(r"grad_norm (\S+)", out)]
    assert len(norms) == 3
    assert all(math.isfinite(norm) and norm > 0 for norm in norms)


def test_an_nccl_program_without_a_gpu(run_cli: RunCli, tmp_path: Path) -> None:
    program = tmp_path / "ring.py"
    program.write_text(
        "import time, torch, torch.distributed as dist\n"
        "dist.init_process_group('nccl')\n"
        "rank, world = dist.get_rank(), dist.get_world_size()\n"
        "sent, got = torch.ones(1 << 20), torch.zeros(1 << 20)\n"
        "begin = time.monotonic()\n"
        "works = dist.batch_isend_irecv([dist.P2POp(dist.isend, sent, (rank + 1) % world),\n"
        "                                dist.P2POp(dist.irecv, got, (rank - 1) % world)])\n"
        "early = bool(got.any())\n"
        "for work in works:\n"
        "    work.wait()\n"
        "print('works', len(works), 'early', early, 'late', bool(got.any()))\n"
        "print('backend', dist.get_backend(), 'ms', 1000 * (time.monotonic() - begin))\n"
    )
    network = tmp_path / "slow.yaml"
    network.write_text(
        "name: slow\ndescription: slow\nnode:\n  name: slow\n  ranks_per_node: 8\n  link: loopback\n"
        "  alpha_beta: {latency_us: 200000.0, bandwidth_GBps: 10.0}\n"
    )
    _, out = emulate(
        run_cli, tmp_path, "--world-size", "4", "--rank", "1", "--network", str(network), "--", str(program)
    )
    assert "works 1 early False late True" in out  # the batch has one Work, complete when all of it is
    assert "backend nccl" in out
    assert float(out.split("ms ")[1]) >= 200


def test_a_failure_over_gathered_objects_is_told_so(run_cli: RunCli, tmp_path: Path) -> None:
    program = tmp_path / "names.py"
    program.write_text(
        "import torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "names = [None] * dist.get_world_size()\n"
        "dist.all_gather_object(names, dist.get_rank())\n"
        "assert names == list(range(len(names))), 'who is who?'\n"
    )
    done = run_cli("emulate", "--world-size", "4", "--rank", "0", "--", str(program))
    assert done.returncode == 1
    assert "AssertionError: who is who? (The objects of all_gather at" in done.stderr


def test_times_add_up_although_calls_are_shorter_than_our_own_work(run_cli: RunCli, tmp_path: Path) -> None:
    program = tmp_path / "calls.py"
    program.write_text(
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "model = torch.nn.Linear(8, 8)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "for step in range(3):\n"
        "    model(torch.ones(1, 8)).sum().backward()\n"
        "    for _ in range(200):\n"
        "        dist.all_reduce(torch.ones(64))\n"
        "    optimizer.step()\n"
    )
    verdict, _ = emulate(
        run_cli, tmp_path, "--world-size", "8", "--rank", "0", "--network", "h100-ib400", "--", str(program)
    )
    steps = verdict["steps"]
    assert isinstance(steps, list)
    for step in steps:
        parts = step["parts"]
        assert parts["compute_ns"] > 0
        # 200 calls of some 10 us, also those that nothing was left of to wait for
        assert 1_000_000 < parts["transfer_ns"] < step["wall_ns"]
