"""Imports point to lower floors, in every file of the three packages."""

from __future__ import annotations

from pathlib import Path

import pytest
from layers import ADAPTERS, CORE, ORDER, violations

ROOT = Path(__file__).resolve().parents[1]
FILES = sorted(path.relative_to(ROOT) for name in (CORE, *ADAPTERS) for path in (ROOT / name).rglob("*.py"))


def test_all_imports_point_to_lower_floors() -> None:
    assert FILES, f"no source files below {ROOT}"
    found = [line for path in FILES for line in violations(path, (ROOT / path).read_text(encoding="utf-8"))]
    assert not found, "\n".join(found)


def test_no_module_stands_twice() -> None:
    assert len(ORDER) == len(set(ORDER))


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("ranklens_core/replayer.py", "from ranklens_core.schema import Signature"),
        ("ranklens_core/replayer.py", "import ranklens_core.task"),
        ("ranklens_core/c10d/call.py", "from ranklens_core.c10d.ops import OPERATORS"),
        ("ranklens_core/c10d/call.py", "from .ops import OPERATORS"),
        ("ranklens_core/c10d/call.py", "from ..schema import Signature"),
        ("ranklens_core/__init__.py", "from ranklens_core.session import record"),
        ("ranklens_core/__main__.py", "from ranklens_core.cli import main"),
        ("ranklens_core/adapters.py", "def load():\n    import ranklens_megatron"),
        ("ranklens_core/adapters.py", "def load():\n    import_module('ranklens_deepspeed')"),
        ("ranklens_megatron/roles.py", "from ranklens_core.session import Session"),
        ("ranklens_megatron/roles.py", "from ranklens_megatron.steps import Steps"),
        ("ranklens_core/schema.py", "import torch, numpy.linalg"),
    ],
)
def test_allowed(path: str, source: str) -> None:
    assert violations(Path(path), source) == []


@pytest.mark.parametrize(
    ("path", "source", "reason"),
    [
        ("ranklens_core/schema.py", "from ranklens_core.session import record", "it stands above (floor 4"),
        ("ranklens_core/schema.py", "def f():\n    import ranklens_core.trace", "it stands above (floor 1"),
        ("ranklens_core/task.py", "from ranklens_core import replayer", "it stands above (floor 3"),
        ("ranklens_core/c10d/ops.py", "from ..session import record", "it stands above"),
        (
            "ranklens_core/c10d/ops.py",
            "if TYPE_CHECKING:\n    from ranklens_core.task import Task",
            "it stands above",
        ),
        ("ranklens_core/session.py", "import ranklens_core", "the package is the users' door"),
        ("ranklens_core/session.py", "from ranklens_core.nowhere import x", "it has no floor: add it"),
        ("ranklens_core/nowhere.py", "", "ranklens_core.nowhere has no floor: add it"),
        (
            "ranklens_core/session.py",
            "def f():\n    import ranklens_megatron.roles",
            "only ranklens_core.adapters",
        ),
        (
            "ranklens_core/session.py",
            "importlib.import_module('ranklens_megatron')",
            "only ranklens_core.adapters",
        ),
        ("ranklens_core/adapters.py", "import ranklens_megatron", "inside a function"),
        ("ranklens_megatron/roles.py", "import ranklens_deepspeed", "knows nothing of the other"),
        ("ranklens_megatron/roles.py", "from ranklens_core.cli import main", "only its __main__"),
    ],
)
def test_forbidden(path: str, source: str, reason: str) -> None:
    (found,) = violations(Path(path), source)
    assert reason in found
