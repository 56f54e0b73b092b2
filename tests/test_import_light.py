"""What answers without importing torch: a person who asks for help does not wait seconds for it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import click
import pytest

from ranklens_core.cli import main

FRAMEWORKS = {"torch", "deepspeed", "megatron"}

VERBS = main.list_commands(click.Context(main))

RUN_AND_LIST = """
import json, sys
from ranklens_core.cli import main

status = 0
try:
    main(sys.argv[1:], prog_name="ranklens")
except SystemExit as end:
    status = end.code or 0
print(json.dumps({"status": status, "imported": list(sys.modules)}))
"""

PROGRAM = """
import torch, torch.distributed as dist

dist.init_process_group("gloo")
dist.all_reduce(torch.ones(4))
dist.destroy_process_group()
"""

RunPython = Callable[..., tuple[int, str, str]]


def ranklens(run_python: RunPython, *args: str | Path) -> tuple[int, str, set[str]]:
    """Run ``ranklens ARGS``: its exit status, what it printed, the top-level modules it imported."""
    returncode, stdout, stderr = run_python(RUN_AND_LIST, *args)
    assert returncode == 0, stderr
    said, _, last_line = stdout.rstrip("\n").rpartition("\n")
    report = json.loads(last_line)
    return report["status"], said + stderr, {name.split(".")[0] for name in report["imported"]}


@pytest.mark.parametrize("option", ["--help", "--version"])
def test_the_command_itself_needs_nothing_heavy(run_python: RunPython, option: str) -> None:
    status, said, imported = ranklens(run_python, option)
    assert status == 0, said
    assert "ranklens" in said
    assert not imported & (FRAMEWORKS | {"numpy", "pyarrow", "hydra"})


@pytest.mark.parametrize("verb", VERBS)
def test_help_of_a_verb_imports_no_framework(run_python: RunPython, verb: str) -> None:
    status, said, imported = ranklens(run_python, verb, "--help")
    assert status == 0, said
    assert f"ranklens {verb}" in said
    assert not imported & FRAMEWORKS


def test_info_imports_no_framework(
    run_python: RunPython, run_cli: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    program, trace = tmp_path / "train.py", tmp_path / "trace"
    program.write_text(PROGRAM)
    status, stdout, stderr = run_cli("record", "--nproc", "2", "--out", trace, "--", program)
    assert status == 0, stdout + stderr

    status, said, imported = ranklens(run_python, "info", trace)
    assert status == 0, said
    assert "train.py" in said
    assert not imported & FRAMEWORKS


def test_info_without_a_trace_says_so_and_imports_no_framework(run_python: RunPython, tmp_path: Path) -> None:
    status, said, imported = ranklens(run_python, "info", tmp_path / "nowhere")
    assert status == 5, said
    assert "nowhere" in said
    assert not imported & FRAMEWORKS


def test_the_package_itself_imports_no_framework(run_python: RunPython) -> None:
    status, stdout, stderr = run_python("import ranklens_core, sys; print(*sys.modules)")
    assert status == 0, stderr
    assert not {name.split(".")[0] for name in stdout.split()} & FRAMEWORKS
