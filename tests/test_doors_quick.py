"""The front doors on real programs: a DeepSpeed config's block, a Megatron-style script's flags."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from conftest import CLI_TIMEOUT_S, run_command

DEEPSPEED = """
import ranklens_deepspeed
import deepspeed, torch
model = torch.nn.Linear(16, 16)
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config="ds.json")
torch.manual_seed(torch.distributed.get_rank())
for step in range(2):
    loss = engine(torch.randn(2, 16)).pow(2).mean()
    engine.backward(loss)
    engine.step()
    print(f"rank {torch.distributed.get_rank()} step {step} loss {loss.item():.9f}", flush=True)
"""

MEGATRON = """
import argparse
import ranklens_megatron
parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=0.1)
args = ranklens_megatron.add_ranklens_args(parser).parse_args()
import torch, torch.distributed as dist
dist.init_process_group("gloo")
value = torch.full((4,), float(dist.get_rank() + 1))
dist.all_reduce(value)
print(f"rank {dist.get_rank()} sum {value[0].item()} lr {args.lr}", flush=True)
"""

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def config(directory: Path, **block: object) -> None:
    (directory / "ds.json").write_text(
        json.dumps(
            {
                "train_micro_batch_size_per_gpu": 2,
                "optimizer": {"type": "Adam", "params": {"lr": 0.001, "torch_adam": True}},
                "zero_optimization": {"stage": 2},
                "ranklens": block,
            }
        )
    )


def losses_of_rank_1(output: str) -> list[str]:
    """Not by lines: torchrun's ranks share a pipe."""
    return re.findall(r"rank 1 step \d loss \d\.\d{9}", output)


def test_a_deepspeed_config_records_and_replays(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(DEEPSPEED)
    config(tmp_path, mode="record", trace="trace", payload="all")
    recorded = run_command([*TORCHRUN, "train.py"], timeout=CLI_TIMEOUT_S, cwd=tmp_path, env=None)
    assert recorded.returncode == 0, recorded.stderr
    losses = losses_of_rank_1(recorded.stdout)
    assert len(losses) == 2

    config(tmp_path, mode="replay", trace="trace", rank=1, verdict="verdict.json")
    replayed = run_command([sys.executable, "train.py"], timeout=CLI_TIMEOUT_S, cwd=tmp_path, env=None)
    assert replayed.returncode == 0, replayed.stderr
    assert losses_of_rank_1(replayed.stdout) == losses
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
def test_a_wrong_block_is_refused_before_the_training(
    tmp_path: Path, block: dict[str, object], text: str
) -> None:
    (tmp_path / "train.py").write_text(DEEPSPEED)
    config(tmp_path, **block)
    done = run_command([sys.executable, "train.py"], timeout=CLI_TIMEOUT_S, cwd=tmp_path, env=None)
    assert done.returncode != 0
    assert text in done.stderr
    assert "step 0" not in done.stdout


def test_a_script_with_our_flags_records_and_replays(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(MEGATRON)
    flags = ["--ranklens-mode", "record", "--ranklens-payload", "all", "--ranklens-trace", "trace"]
    recorded = run_command(
        [*TORCHRUN, "train.py", "--lr", "0.5", *flags], timeout=CLI_TIMEOUT_S, cwd=tmp_path, env=None
    )
    assert recorded.returncode == 0, recorded.stderr
    assert "rank 1 sum 3.0 lr 0.5" in recorded.stdout
    replayed = run_command(
        [sys.executable, "train.py", "--lr", "0.5", "--ranklens-rank", "1", "--ranklens-trace", "trace"],
        timeout=CLI_TIMEOUT_S,
        cwd=tmp_path,
        env=None,
    )
    assert replayed.returncode == 0, replayed.stderr
    assert "rank 1 sum 3.0 lr 0.5" in replayed.stdout
    assert "1 of 1 calls match" in replayed.stderr
