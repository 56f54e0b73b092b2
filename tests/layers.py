"""The floors of RankLens' modules, and which imports of a source file break them."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Set
from pathlib import Path

CORE = "ranklens_core"
ADAPTERS = ("ranklens_deepspeed", "ranklens_megatron")

FLOORS: list[list[str]] = [
    [
        "errors",
        "schema",
        "clock",
        "text",
        "patches",
        "debugger",
        "leaving",
        "own_command",
        "hash_seed",
        "active",
        "start_over",
        "configs_dir",
        "import_hook",
        "load_alone",
    ],
    ["trace", "c10d", "steps"],
    ["completion", "timing", "check"],
    [
        "task",
        "settings",
        "pattern",
        "restart",
        "matching",
        "delivery",
        "spans",
        "own_work",
        "in_time",
        "network_time",
        "recorded_failure",
        "recorder",
        "replayer",
        "analysis",
    ],
    [
        "verdict",
        "environment",
        "program_end",
        "bypass",
        "program",
        "preimport",
        "printed",
        "place",
        "own_cores",
        "rank_failure",
        "diagnose",
        "rank_output",
        "rank_process",
        "local_job",
        "cpu_cuda",
        "memory",
        "standin",
        "adapters",
        "record_session",
        "lone_rank",
        "step_times",
        "step_meter",
        "judgement",
        "timekeeper",
        "emulate_session",
        "replay_session",
        "session",
        "cluster",
        "run",
    ],
    ["cli", "pytest_plugin"],
]
"""From the ground up (docs/design.md, section 3). A module imports only what stands before it: on a
lower floor, or earlier on its own. Above them all stand the adapters (``ADAPTERS``)."""

DOORS = ("__init__", "__main__")
"""The package's own two files: they may import everything in the core, and nothing imports them."""

ADAPTER_DOORS = ("__main__",)
"""What starts a program from an adapter's package: it uses what the verbs use."""

LAZY_ADAPTERS = "adapters"
"""The only module of the core that may import an adapter, and only inside a function."""

ORDER = [module for floor in FLOORS for module in floor]


def violations(path: Path, source: str) -> list[str]:
    """What is wrong with the imports of the file ``path`` (relative to the checkout), one line each."""
    package, module = path.parts[0], Path(path.parts[1]).stem
    if package == CORE and module not in ORDER and module not in DOORS:
        return [f"{path}: ranklens_core.{module} has no floor: add it to FLOORS in tests/layers.py"]
    found = []
    for line, target, in_function in imports(path, source):
        reason = _objection(package, module, target, in_function)
        if reason:
            found.append(f"{path}:{line}: {package}.{module} imports {target}: {reason}")
    return found


def _objection(package: str, module: str, target: str, in_function: bool) -> str:
    """Why ``package.module`` may not import ``target``; ``""`` if it may."""
    to_package, _, rest = target.partition(".")
    to_module = rest.partition(".")[0]
    if to_package in ADAPTERS:
        if to_package == package:
            return ""
        if package in ADAPTERS:
            return "an adapter knows nothing of the other"
        if module != LAZY_ADAPTERS:
            return f"only ranklens_core.{LAZY_ADAPTERS} knows the adapters"
        return "" if in_function else "an adapter is imported inside a function, when its framework is there"
    if package == CORE and to_module == module:
        return ""
    if package == CORE and module in DOORS:
        return ""
    if not to_module:
        return "the package is the users' door: import the module that has the name"
    if to_module not in ORDER:
        return "it has no floor: add it to FLOORS in tests/layers.py"
    if package in ADAPTERS:
        return (
            ""
            if to_module not in FLOORS[-1] or module in ADAPTER_DOORS
            else "of an adapter only its __main__ imports the command line"
        )
    if ORDER.index(to_module) > ORDER.index(module):
        return f"it stands above (floor {_floor(to_module)}, the importer is on {_floor(module)})"
    return ""


def _floor(module: str) -> int:
    return next(number for number, floor in enumerate(FLOORS) if module in floor)


def imports(path: Path, source: str) -> Iterator[tuple[int, str, bool]]:
    """Each import of one of our packages: line, dotted module, whether it is inside a function.

    An import under ``if TYPE_CHECKING`` counts like any other: types are dependencies too.
    """
    ours = {CORE, *ADAPTERS}
    tree = ast.parse(source, str(path))
    functions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
    inner = {id(node) for outer in ast.walk(tree) if isinstance(outer, functions) for node in ast.walk(outer)}
    for node in ast.walk(tree):
        for target in _targets(path, node, ours):
            yield node.lineno, target, id(node) in inner  # type: ignore[attr-defined]


def _targets(path: Path, node: ast.AST, ours: Set[str]) -> Iterator[str]:
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:
            parents = path.parts[: len(path.parts) - node.level]
            base = ".".join([*parents, base] if base else parents)
        # "from ranklens_core import schema" imports the module, "from ranklens_core import record"
        # too, unless it is a name of the door: both are spelt the same, and both are checked.
        names = [f"{base}.{alias.name}" for alias in node.names] if base == CORE else [base]
    elif isinstance(node, ast.Call) and _is_import_call(node.func) and node.args:
        first = node.args[0]
        names = [first.value] if isinstance(first, ast.Constant) and isinstance(first.value, str) else []
    else:
        return
    yield from (name for name in names if name.split(".")[0] in ours)


def _is_import_call(function: ast.expr) -> bool:
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    return name in ("import_module", "__import__")
