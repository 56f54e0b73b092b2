"""The frameworks' front doors on whole programs: they do what the verbs do."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import CLI_TIMEOUT_S, CliResult, run_command
from trace_samples import write_trace

TRAIN = """
import argparse, sys
import torch, torch.distributed as dist
{first}
parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
parser.add_argument("--deepspeed_config")
{learn}
args = parser.parse_args()
import deepspeed
{early}
model = torch.nn.Linear(4, 1)
torch.nn.init.ones_(model.weight)
torch.nn.init.zeros_(model.bias)
engine, *_ = deepspeed.initialize(
    args=args, model=model, model_parameters=model.parameters(){config}
)
for step in range(2):
    loss = engine(torch.full((2, 4), 1.0 + dist.get_rank())).pow(2).mean()
    engine.backward(loss)
    engine.step()
    print(f"rank {{dist.get_rank()}} step {{step}} loss {{loss.item():.6f}}", flush=True)
dist.barrier()
dist.destroy_process_group()
"""
# With the barrier gloo's threads have let go of the last tensors; else torch may abort the interpreter's exit
# ("terminate called without an active exception"), recorded or not.
CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "zero_optimization": {"stage": 1},
    "optimizer": {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}},
}


def write_config(path: Path, config: object) -> None:
    path.write_text(json.dumps(config))


RunIn = Callable[..., CliResult]


@pytest.fixture
def run_in(tmp_path: Path) -> RunIn:
    def run(*command: str) -> CliResult:
        return run_command(
            [sys.executable, *command], timeout=CLI_TIMEOUT_S, cwd=tmp_path, env={"DS_ACCELERATOR": "cpu"}
        )

    return run


def program(tmp_path: Path, **parts: str) -> None:
    blanks = {"first": "", "learn": "", "early": "", "config": ""}
    (tmp_path / "train.py").write_text(TRAIN.format(**{**blanks, **parts}))


TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def losses(output: str, rank: int) -> list[str]:
    """Not by lines: torchrun's ranks share a pipe."""
    number = r"\d+\.\d+"
    line = rf"rank {rank} step \d loss {number}(?: grad_norm {number})?(?: of (?:None|\d))?"
    return sorted(re.findall(line, output))


def test_deepspeed_config_file_under_torchrun_and_plain_python(run_in: RunIn, tmp_path: Path) -> None:
    """The one-line way to record, the no-line way to replay."""
    program(tmp_path, first="import ranklens_deepspeed")
    block = {"mode": "record", "trace": "t", "payload": "all", "rank": 1, "verdict": "verdict.json"}
    write_config(tmp_path / "ds.json", {**CONFIG, "ranklens": block})
    recorded = run_in(*TORCHRUN, "train.py", "--deepspeed_config", "ds.json")
    assert recorded.returncode == 0, recorded.stderr
    write_config(tmp_path / "ds.json", {**CONFIG, "ranklens": {**block, "mode": "replay"}})
    replayed = run_in("-m", "ranklens_deepspeed", "train.py", "--deepspeed_config", "ds.json")
    assert replayed.returncode == 0, replayed.stderr
    assert losses(replayed.stdout, 1) == losses(recorded.stdout, 1) != []
    verdict = json.loads((tmp_path / "verdict.json").read_text())
    assert 0 < verdict["structure"]["matched"] == verdict["structure"]["total"]
    assert 0 < verdict["values"]["identical"] == verdict["values"]["compared"]


def test_deepspeed_config_file_named_in_the_program(run_in: RunIn, tmp_path: Path) -> None:
    program(tmp_path, first="import ranklens_deepspeed", config=', config="ds.json"')
    block = {"mode": "record", "trace": "t", "payload": "all", "rank": 1, "verdict": "verdict.json"}
    write_config(tmp_path / "ds.json", {**CONFIG, "zero_optimization": {"stage": 2}, "ranklens": block})
    recorded = run_in(*TORCHRUN, "train.py")
    assert recorded.returncode == 0, recorded.stderr
    assert len(losses(recorded.stdout, 1)) == 2
    block["mode"] = "replay"
    write_config(tmp_path / "ds.json", {**CONFIG, "zero_optimization": {"stage": 2}, "ranklens": block})
    replayed = run_in("train.py")
    assert replayed.returncode == 0, replayed.stderr
    assert losses(replayed.stdout, 1) == losses(recorded.stdout, 1)
    verdict = json.loads((tmp_path / "verdict.json").read_text())
    assert (verdict["rank"], verdict["world_size"], verdict["status"]) == (1, 2, "ok")
    assert verdict["structure"]["matched"] == verdict["structure"]["total"] > 0
    assert verdict["values"]["identical"] == verdict["values"]["compared"] > 0


@pytest.mark.parametrize(
    ("block", "text"),
    [
        ({"mode": "repaly"}, '"ranklens"."mode" is \'repaly\'. Allowed: record, replay, emulate or off.'),
        ({"mode": "replay", "rnk": 1}, '"ranklens"."rnk"'),
        ({"mode": "replay", "rank": 1, "trace": "nowhere"}, "nowhere"),
    ],
)
def test_a_wrong_block_found_by_the_import_is_refused_before_the_training(
    block: dict[str, Any], text: str, run_in: RunIn, tmp_path: Path
) -> None:
    program(tmp_path, first="import ranklens_deepspeed", config=', config="ds.json"')
    write_config(tmp_path / "ds.json", {**CONFIG, "ranklens": block})
    done = run_in("train.py")
    assert done.returncode != 0
    assert text in done.stderr
    assert "step 0" not in done.stdout


def test_deepspeed_dict_and_an_own_init_distributed(run_in: RunIn, tmp_path: Path) -> None:
    def write(mode: str) -> None:
        block = {"mode": mode, "trace": "t", "payload": "all", "rank": 0}
        program(
            tmp_path,
            first="import ranklens_deepspeed",
            early="deepspeed.init_distributed()",
            config=f", config={ {**CONFIG, 'ranklens': block}!r}",
        )

    write("record")
    recorded = run_in(*TORCHRUN, "train.py")
    assert recorded.returncode == 0, recorded.stderr
    write("replay")
    replayed = run_in("train.py")
    assert replayed.returncode == 0, replayed.stderr
    assert losses(replayed.stdout, 0) == losses(recorded.stdout, 0) != []
    assert "rank 0 of 2" in replayed.stderr


def test_deepspeed_block_that_comes_too_late(run_in: RunIn, tmp_path: Path) -> None:
    computed = f"mode = 'record'\nds = dict({CONFIG!r}, ranklens={{'mode': mode, 'payload': 'all'}})"
    program(
        tmp_path,
        first="import ranklens_deepspeed",
        early=f"deepspeed.init_distributed()\n{computed}",
        config=", config=ds",
    )
    late = run_in(*TORCHRUN, "train.py")
    assert late.returncode != 0
    assert "was found after torch.distributed was initialised" in late.stderr
    assert not (tmp_path / "ranklens-trace").exists()
    program(
        tmp_path,
        first=f"import ranklens_deepspeed\n{computed}\nranklens_deepspeed.activate(ds)",
        early="deepspeed.init_distributed()",
        config=", config=ds",
    )
    in_time = run_in(*TORCHRUN, "train.py")
    assert in_time.returncode == 0, in_time.stderr
    assert (tmp_path / "ranklens-trace" / "rank-00001").is_dir()


def test_without_a_block_nothing_happens(run_in: RunIn, tmp_path: Path) -> None:
    program(tmp_path, first="import ranklens_deepspeed")
    write_config(tmp_path / "ds.json", CONFIG)
    plain = run_in(*TORCHRUN, "train.py", "--deepspeed_config", "ds.json")
    assert plain.returncode == 0, plain.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ds.json", "train.py"]


@pytest.mark.parametrize(
    ("block", "status", "message"),
    [
        ({"mode": "replay", "rnak": 1}, 2, 'ds.json: there is no "ranklens"."rnak"'),
        ({"mode": "replay"}, 2, 'ds.json: "ranklens"."rank" is missing'),
        (
            {"mode": "replay", "rank": 2, "trace": "made"},
            2,
            'ds.json: "ranklens"."rank" is 2, but the trace made',
        ),
        (
            {"mode": "replay", "rank": 1, "world_size": 8, "trace": "made"},
            2,
            'ds.json: "ranklens"."world_size" is 8, but the trace made has 2 ranks',
        ),
        ({"mode": "replay", "rank": 1, "trace": "gone"}, 5, "gone"),
        ({"mode": "record"}, 2, "This process is no rank of a job"),
    ],
)
def test_a_wrong_block_ends_before_the_program_starts(
    block: dict[str, Any], status: int, message: str, run_in: RunIn, tmp_path: Path
) -> None:
    write_trace(tmp_path / "made", world_size=2)
    (tmp_path / "train.py").write_text("print('started')")
    write_config(tmp_path / "ds.json", {"ranklens": block})
    for module in ([], ["--config", "ds.json"]):
        args = ["train.py", "--deepspeed_config", "ds.json"]
        result = run_in("-m", "ranklens_deepspeed", *module, *args)
        assert (result.returncode, result.stdout) == (status, "")
        assert message in result.stderr


GPT = ("-m", "ranklens_megatron.examples.gpt", "--pp", "1", "--steps", "2")


def test_megatron_flags_under_torchrun_and_alone(run_in: RunIn, tmp_path: Path) -> None:
    record = ("--ranklens-mode", "record", "--ranklens-trace", "t", "--ranklens-payload", "all")
    recorded = run_in(*TORCHRUN, "-m", "ranklens_megatron", *GPT, *record)
    assert recorded.returncode == 0, recorded.stderr
    replay = ("--ranklens-rank", "1", "--ranklens-trace", "t", "--ranklens-verdict", "v.json")
    replayed = run_in("-m", "ranklens_megatron", *GPT, *replay)
    assert replayed.returncode == 0, replayed.stderr
    assert losses(replayed.stdout, 1) == losses(recorded.stdout, 1) != []
    verdict = json.loads((tmp_path / "v.json").read_text())
    assert 0 < verdict["values"]["identical"] == verdict["values"]["compared"]
    outside = run_in("-m", "ranklens_megatron", *GPT, "--ranklens-rank", "2", "--ranklens-trace", "t")
    assert outside.returncode == 2
    assert "--ranklens-rank is 2, but the trace t has the ranks 0 to 1" in outside.stderr
    missing = run_in("-m", "ranklens_megatron", *GPT, "--ranklens-rank", "1", "--ranklens-trace", "nowhere")
    assert missing.returncode == 5
    assert "nowhere" in missing.stderr


OWN_SCRIPT = """
import argparse
import ranklens_megatron
parser = argparse.ArgumentParser()
parser.add_argument("--size", type=int, default=4)
args = ranklens_megatron.add_ranklens_args(parser).parse_args()
import torch, torch.distributed as dist
dist.init_process_group("gloo")
value = torch.ones(args.size)
dist.all_reduce(value)
print(f"rank {dist.get_rank()} step 0 loss {value.sum().item()} of {args.ranklens_rank}", flush=True)
dist.destroy_process_group()
"""


def test_an_own_script_with_the_flags(run_in: RunIn, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(OWN_SCRIPT)
    flags = ("--ranklens-mode=record", "--ranklens-payload=all")
    recorded = run_in(*TORCHRUN, "train.py", "--size", "3", *flags)
    assert recorded.returncode == 0, recorded.stderr
    assert losses(recorded.stdout, 1) == ["rank 1 step 0 loss 6.0 of None"]
    replayed = run_in("train.py", "--size", "3", "--ranklens-rank", "1")
    assert (replayed.returncode, replayed.stdout) == (0, "rank 1 step 0 loss 6.0 of 1\n"), replayed.stderr
    assert "1 of 1 calls match" in replayed.stderr


FAKE_ARGUMENTS = """
import argparse
def add_megatron_arguments(parser):
    parser.add_argument("--lr", type=float)
    return parser
def parse_args():
    return add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False)).parse_args()
"""


def test_megatron_lms_parser_learns_the_flags(run_in: RunIn, tmp_path: Path) -> None:
    """As in Megatron-LM's checkout, where megatron/training lies beside the script."""
    package = tmp_path / "megatron" / "training"
    package.mkdir(parents=True)
    (package / "arguments.py").write_text(FAKE_ARGUMENTS)
    (tmp_path / "pretrain.py").write_text(
        "from megatron.training.arguments import parse_args\nargs = parse_args()\n"
        "print(args.lr, args.ranklens_mode, args.ranklens_rank)\n"
    )
    off = ("--ranklens-mode", "off", "--ranklens-rank", "3")
    result = run_in("-m", "ranklens_megatron", "pretrain.py", "--lr", "1", *off)
    assert (result.returncode, result.stdout) == (0, "1.0 off 3\n"), result.stderr
    helped = run_in("-m", "ranklens_megatron", "pretrain.py", "--help")
    assert helped.returncode == 0
    assert "--ranklens-payload" in helped.stdout
