"""Adapters: group roles and step boundaries of real jobs, and leaving the frameworks as they were."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import RunCli

from ranklens_core.trace import Trace, open_trace


def roles(trace: Trace, rank: int) -> dict[str, tuple[int, ...]]:
    """Role -> global ranks, of the groups of ``rank`` that have one."""
    found: dict[str, tuple[int, ...]] = {}
    for group in trace.ranks[rank].groups:
        for role in group.role.split("+"):
            found.setdefault(role, group.ranks)
    return found


def test_megatron_roles_and_steps(run_cli: RunCli, tmp_path: Path) -> None:
    out = tmp_path / "trace"
    program = ["-m", "ranklens_megatron.examples.gpt", "--tp", "2", "--pp", "2", "--steps", "2"]
    recorded = run_cli("record", "--nproc", "4", "--out", out, "--", *program)
    assert recorded.returncode == 0, recorded.stderr
    trace = open_trace(out)
    assert [len(record.steps) for record in trace.ranks.values()] == [2, 2, 2, 2]
    found = roles(trace, 3)
    assert {role: found[role] for role in ("tp", "pp", "dp", "mp", "embedding")} == {
        "tp": (2, 3),
        "pp": (1, 3),
        "dp": (3,),
        "mp": (0, 1, 2, 3),
        "embedding": (1, 3),
    }
    verdict = tmp_path / "verdict.json"
    replayed = run_cli("replay", out, "--rank", "3", "--verdict", verdict, "--", *program)
    assert replayed.returncode == 0, replayed.stderr
    assert judged(verdict)["roles"] == ["tp 1/2", "pp 1/2", "dp 0/1"]
    assert [step["index"] for step in judged(verdict)["steps"]] == [0, 1]


def test_deepspeed_roles_and_steps(run_cli: RunCli, tmp_path: Path) -> None:
    out = tmp_path / "trace"
    program = ["-m", "ranklens_deepspeed.examples.zero", "--stage", "2", "--steps", "2"]
    recorded = run_cli("record", "--nproc", "2", "--out", out, "--", *program)
    assert recorded.returncode == 0, recorded.stderr
    trace = open_trace(out)
    # two micro-batches a step are accumulated: one end a step, none in between
    assert [len(record.steps) for record in trace.ranks.values()] == [2, 2]
    assert roles(trace, 1)["dp"] == (0, 1)
    first_training = next(call for call in trace.rank(1).call_records() if call.row.training)
    assert first_training.row.step == 0
    verdict = tmp_path / "verdict.json"
    replayed = run_cli("replay", out, "--rank", "1", "--verdict", verdict, "--", *program)
    assert replayed.returncode == 0, replayed.stderr
    assert judged(verdict)["roles"] == ["dp 1/2"]


def test_deepspeed_pipeline_roles_and_steps(run_cli: RunCli, tmp_path: Path) -> None:
    out = tmp_path / "trace"
    program = ["-m", "ranklens_deepspeed.examples.pipe", "--stages", "2", "--steps", "2"]
    recorded = run_cli("record", "--nproc", "4", "--out", out, "--", *program)
    assert recorded.returncode == 0, recorded.stderr
    trace = open_trace(out)
    assert [len(record.steps) for record in trace.ranks.values()] == [2, 2, 2, 2]
    assert {role: ranks for role, ranks in roles(trace, 3).items() if role in ("dp", "pipe")} == {
        "dp": (2, 3),
        "pipe": (1, 3),
    }
    for rank in (0, 3):
        replayed = run_cli("replay", out, "--rank", str(rank), "--", *program)
        assert replayed.returncode == 0, replayed.stderr


def judged(file: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(file.read_text())
    return loaded


REMOVAL = """
import importlib, sys, warnings
warnings.simplefilter("ignore")
names = {names!r}
def held():
    found = {{}}
    for name in names:
        module, _, cls = name.partition(":")
        owner = importlib.import_module(module)
        owner = getattr(owner, cls) if cls else owner
        found.update({{(name, key): id(value) for key, value in vars(owner).items()}})
    return found
before = held()
from ranklens_core.clock import ManualClock
from ranklens_core.steps import Steps
from {package}.adapter import Adapter
before = held()
adapter = Adapter(Steps(ManualClock(), lambda: None, lambda step: None))
during = held()
adapter.remove()
print(len(before), sum(before[key] != during[key] for key in before), held() == before)
"""


@pytest.mark.parametrize(
    ("package", "names", "changed"),
    [
        (
            "ranklens_deepspeed",
            ["deepspeed.runtime.engine:DeepSpeedEngine", "deepspeed.runtime.pipe.engine:PipelineEngine"],
            4,
        ),
        (
            "ranklens_megatron",
            [
                "megatron.core.pipeline_parallel.schedules",
                "megatron.core.optimizer.optimizer:MegatronOptimizer",
                "megatron.core.optimizer.optimizer:MixedPrecisionOptimizer",
                "megatron.core.optimizer.optimizer:FP32Optimizer",
                "megatron.core.optimizer.optimizer:ChainedOptimizer",
            ],
            7,
        ),
    ],
)
def test_removing_leaves_the_framework_as_it_was(
    package: str, names: list[str], changed: int, run_python: Any
) -> None:
    result = run_python(REMOVAL.format(names=names, package=package))
    assert result.returncode == 0, result.stderr
    total, touched, same = result.stdout.split()[-3:]
    assert (int(touched), same) == (changed, "True")
    assert int(total) > changed


def test_an_adapter_that_does_not_fit_never_breaks_a_recording(tmp_path: Path, run_python: Any) -> None:
    source = (
        "import sys, types\n"
        "broken = types.ModuleType('ranklens_deepspeed.adapter')\n"
        "sys.modules['ranklens_deepspeed.adapter'] = broken\n"
        "from ranklens_core.adapters import Adapters\n"
        "from ranklens_core.clock import ManualClock\n"
        "from ranklens_core.steps import Steps\n"
        "steps = Steps(ManualClock(), lambda: None, lambda step: None)\n"
        "adapters = Adapters(steps, strict=False)\n"
        "import deepspeed\n"
        "print(adapters.active)\n"
        "adapters.remove()\n"
    )
    result = run_python(source)
    assert (result.returncode, result.stdout.split()[-1]) == (0, "[]"), result.stderr
    assert "does not fit this version of its framework" in result.stderr


def test_nothing_is_imported_for_a_program_without_frameworks(run_python: Any) -> None:
    result = run_python(
        "import sys\n"
        "from ranklens_core.adapters import Adapters\n"
        "from ranklens_core.clock import ManualClock\n"
        "from ranklens_core.steps import Steps\n"
        "adapters = Adapters(Steps(ManualClock(), lambda: None, lambda step: None), strict=True)\n"
        "print([name for name in ('deepspeed', 'megatron') if name in sys.modules])\n"
        "adapters.remove()\n"
    )
    assert (result.returncode, result.stdout) == (0, "[]\n"), result.stderr
    assert sys.modules.get("ranklens_deepspeed.adapter") is None
