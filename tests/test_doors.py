"""What the frameworks' front doors are told: found, and checked before anything starts."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

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


def test_local_rank_of_deepspeeds_launcher_is_the_programs() -> None:
    from ranklens_core.cli.door import move_local_rank

    assert move_local_rank(["--local_rank=1", "a.py", "-x"]) == ["a.py", "--local_rank=1", "-x"]
    assert move_local_rank(["--local_rank=1", "-m", "a.b", "-x"]) == ["-m", "a.b", "--local_rank=1", "-x"]
    assert move_local_rank(["a.py", "--local_rank=1"]) == ["a.py", "--local_rank=1"]
