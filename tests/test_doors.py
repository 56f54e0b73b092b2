"""The frameworks' front doors: what they are told is checked before anything starts, and they do what the
verbs do."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from conftest import CliResult, run_command
from trace_samples import write_trace

from ranklens_core.errors import UsageError
from ranklens_core.own_command import StartedAs, started_as
from ranklens_core.program import Program
from ranklens_core.settings import KEYS, Mode, Settings, Spelling, check_world, parse_window, read_settings
from ranklens_deepspeed.block import Block, block_of, find_block
from ranklens_megatron.arguments import add_ranklens_args, split_arguments

JSON = Spelling('"ranklens"."{}"', "ds.json")


def test_every_setting_is_documented_for_both_doors() -> None:
    assert list(KEYS) == [field.name for field in msgspec.structs.fields(Settings)]
    docs = Path(__file__).parents[1] / "docs"
    deepspeed, megatron = (docs / "deepspeed.md").read_text(), (docs / "megatron.md").read_text()
    for name in KEYS:
        assert f"| `{name}` |" in deepspeed
        assert f"| `--ranklens-{name.replace('_', '-')}` |" in megatron


def test_settings_as_json_and_as_flags() -> None:
    settings = read_settings({"mode": "record", "payload": [0, 5], "steps": "2:4", "world_size": 8}, JSON)
    assert (settings.mode, settings.payload, settings.window) == (Mode.RECORD, "0,5", (2, 4))
    flags = ["a.py", "--ranklens-rank=5", "--lr", "1", "--ranklens-world-size", "8", "--ranklens-overwrite"]
    settings, values, rest = split_arguments(flags)
    assert (settings.rank, settings.world_size, settings.overwrite) == (5, 8, True)
    assert (settings.acting_mode, rest) == (Mode.REPLAY, ["a.py", "--lr", "1"])
    assert values == {"rank": "5", "world_size": "8", "overwrite": True}
    assert read_settings({}, JSON).acting_mode is Mode.OFF


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rnak": 5}, r'ds.json: there is no "ranklens"."rnak". There are: "ranklens"."mode",'),
        (
            {"mode": "recrod"},
            r'ds.json: "ranklens"."mode" is .recrod.. Allowed: record, replay, emulate or off',
        ),
        ({"rank": -1}, r'"rank" is -1. Allowed: a rank of the job'),
        ({"rank": True}, r'"rank" is True'),
        ({"rank": 1.0}, r'"rank" is 1.0'),
        ({"world_size": 0}, r'"world_size" is 0. Allowed: a number of ranks, 1 or more'),
        ({"task": "debgu"}, r'"task" is .debgu.. Allowed: debug, profile'),
        ({"steps": "4:2"}, r'"steps" is .4:2.. Allowed: A:B'),
        ({"payload": "0;5"}, r'"payload" is .0;5.. Allowed: all, none or ranks'),
        ({"payload": [0, "5"]}, r'"payload" is'),
        ({"trace": ""}, r'"trace" is ..\. Allowed: a directory'),
        ({"overwrite": "maybe"}, r'"overwrite" is .maybe.. Allowed: true or false'),
    ],
)
def test_a_wrong_setting_names_key_allowed_values_and_file(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        read_settings(values, JSON)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--ranklens-rnak", "5"], "command line: there is no --ranklens-rnak. There are: --ranklens-mode"),
        (["--ranklens-rank", "five"], "--ranklens-rank is 'five'. Allowed: a rank of the job"),
        (["--ranklens-rank"], "--ranklens-rank needs a value"),
        (["--ranklens-rank", "--lr"], "--ranklens-rank needs a value"),
        (["--ranklens-rank", "1", "--ranklens-rank", "2"], "--ranklens-rank is there twice"),
        (["--ranklens-overwrite=yes"], "--ranklens-overwrite takes no value"),
    ],
)
def test_a_wrong_flag_is_named(flags: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        split_arguments(flags)


def test_a_world_that_contradicts_the_trace() -> None:
    check_world(Settings(rank=7, world_size=8), 8, "the trace t", JSON)
    with pytest.raises(
        UsageError, match=r'ds.json: "ranklens"."world_size" is 16, but the trace t has 8 ranks'
    ):
        check_world(Settings(world_size=16), 8, "the trace t", JSON)
    with pytest.raises(UsageError, match=r'"rank" is 8, but the trace t has the ranks 0 to 7'):
        check_world(Settings(rank=8), 8, "the trace t", JSON)


@pytest.mark.parametrize("text", ["", "3", "b:3", "3:3", "-1:2", "4:2"])
def test_what_is_no_window(text: str) -> None:
    with pytest.raises(ValueError, match=r"invalid literal|^.:.$|^-1:2$|^3$|^$"):
        parse_window(text)


BLOCK = {"mode": "replay", "rank": 5}


def write_json(path: Path, config: object) -> Path:
    path.write_text(json.dumps(config))
    return path


def test_where_a_block_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import base64

    monkeypatch.chdir(tmp_path)
    write_json(tmp_path / "ds.json", {"ranklens": BLOCK})
    write_json(tmp_path / "plain.json", {"bf16": {}})
    program = tmp_path / "train.py"

    def found(source: str, *args: str) -> Block | None:
        program.write_text(source)
        return find_block(Program(str(program), args=args))

    assert found("pass") is None
    assert found("pass", "--deepspeed_config", "plain.json") is None
    assert found("pass", "--deepspeed_config", "ds.json") == Block(values=BLOCK, where="ds.json")
    assert found("pass", "--deepspeed=ds.json") == Block(values=BLOCK, where="ds.json")
    coded = base64.urlsafe_b64encode(json.dumps({"ranklens": BLOCK}).encode()).decode()
    assert found("pass", "--deepspeed_config", coded) == Block(values=BLOCK, where="--deepspeed_config")
    literal = "config = {\n 'bf16': {},\n 'ranklens': {'mode': 'replay', 'rank': 5}}"
    assert found(literal) == Block(values=BLOCK, where="train.py:3")
    assert found("config = {'ranklens': {'rank': rank}}") is None
    assert found("deepspeed.initialize(config='ds.json')") == Block(values=BLOCK, where="ds.json")
    assert found("x = {'ranklens': {'rank': 1}}", "--deepspeed_config", "ds.json").values == BLOCK  # type: ignore[union-attr]
    with pytest.raises(UsageError, match="two different"):
        found("a = {'ranklens': {'rank': 1}}\nb = {'ranklens': {'rank': 2}}")
    with pytest.raises(UsageError, match="has to be an object"):
        found("a = {'ranklens': 'record'}")
    assert block_of(3, "x") is None


def test_how_python_was_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def started(orig_argv: list[str], argv: list[str]) -> StartedAs | None:
        monkeypatch.setattr(sys, "orig_argv", orig_argv)
        monkeypatch.setattr(sys, "argv", argv)
        return started_as()

    assert started(["python", "-u", "a.py", "1"], ["a.py", "1"]) == StartedAs(("-u",), ("a.py",), ("1",))
    module = started(["python", "-m", "a.b", "-x"], ["-m", "-x"])
    assert module == StartedAs((), ("-m", "a.b"), ("-x",))
    door = started(["python", "-m", "ranklens_megatron", "a.py"], ["/x/__main__.py", "a.py"])
    assert door is not None
    assert door.is_ranklens
    assert started(["python", "-c", "pass"], ["-c"]) is None
    assert started(["python", "-X", "importtime", "a.py"], ["a.py"]) is None


def test_a_parser_learns_the_flags_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py"])
    parser = add_ranklens_args(add_ranklens_args(argparse.ArgumentParser()))
    args = parser.parse_args(["--ranklens-rank", "3"])
    assert (args.ranklens_rank, args.ranklens_mode, args.ranklens_overwrite) == (3, None, False)
    assert "--ranklens-world-size" in parser.format_help()


def test_flags_where_the_program_cannot_be_started_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", "--ranklens-rank", "3"])
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "pytest"])
    with pytest.raises(UsageError, match="python -m ranklens_megatron PROGRAM ARGS"):
        add_ranklens_args(argparse.ArgumentParser())


# Whole programs.

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
"""
CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "zero_optimization": {"stage": 1},
    "optimizer": {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}},
}
RunIn = Callable[..., CliResult]


@pytest.fixture
def run_in(tmp_path: Path) -> RunIn:
    def run(*command: str) -> CliResult:
        return run_command(
            [sys.executable, *command], timeout=240, cwd=tmp_path, env={"DS_ACCELERATOR": "cpu"}
        )

    return run


def program(tmp_path: Path, **parts: str) -> None:
    blanks = {"first": "", "learn": "", "early": "", "config": ""}
    (tmp_path / "train.py").write_text(TRAIN.format(**{**blanks, **parts}))


TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def losses(output: str, rank: int) -> list[str]:
    return sorted(line for line in output.splitlines() if line.startswith(f"rank {rank} step "))


def test_deepspeed_config_file_under_torchrun_and_plain_python(run_in: RunIn, tmp_path: Path) -> None:
    """The one-line way to record, the no-line way to replay."""
    program(tmp_path, first="import ranklens_deepspeed")
    block = {"mode": "record", "trace": "t", "payload": "all", "rank": 1, "verdict": "verdict.json"}
    write_json(tmp_path / "ds.json", {**CONFIG, "ranklens": block})
    recorded = run_in(*TORCHRUN, "train.py", "--deepspeed_config", "ds.json")
    assert recorded.returncode == 0, recorded.stderr
    write_json(tmp_path / "ds.json", {**CONFIG, "ranklens": {**block, "mode": "replay"}})
    replayed = run_in("-m", "ranklens_deepspeed", "train.py", "--deepspeed_config", "ds.json")
    assert replayed.returncode == 0, replayed.stderr
    assert losses(replayed.stdout, 1) == losses(recorded.stdout, 1) != []
    verdict = json.loads((tmp_path / "verdict.json").read_text())
    assert 0 < verdict["structure"]["matched"] == verdict["structure"]["total"]
    assert 0 < verdict["values"]["identical"] == verdict["values"]["compared"]


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
    write_json(tmp_path / "ds.json", CONFIG)
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
    write_json(tmp_path / "ds.json", {"ranklens": block})
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


def test_local_rank_of_deepspeeds_launcher_is_the_programs() -> None:
    from ranklens_core.cli.door import move_local_rank

    assert move_local_rank(["--local_rank=1", "a.py", "-x"]) == ["a.py", "--local_rank=1", "-x"]
    assert move_local_rank(["--local_rank=1", "-m", "a.b", "-x"]) == ["-m", "a.b", "--local_rank=1", "-x"]
    assert move_local_rank(["a.py", "--local_rank=1"]) == ["a.py", "--local_rank=1"]
