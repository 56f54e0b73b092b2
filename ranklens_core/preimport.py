"""Which frameworks to import once before forking ranks: read from the program's source, nothing executed.

A rank that imports torch and a framework itself needs about 3 s and 340 MB; one forked after the import needs
neither.
"""

from __future__ import annotations

import ast
import importlib.util
import os
from collections.abc import Iterator

from ranklens_core.program import Program

FRAMEWORKS = (
    "torch",
    "deepspeed",
    "megatron.core",
    "transformers",
    "accelerate",
    "datasets",
    "lightning",
    "pytorch_lightning",
    "torchvision",
    "numpy",
)
_WITHOUT_TORCH = ("numpy", "datasets")
# The first optimizer or DDP module imports torch._dynamo: 0.9 s and 73 MB a rank (torch 2.13) if not shared.
_TORCH = ("torch", "torch.distributed", "torch._dynamo")
# Megatron-LM is run from its checkout, where megatron/ lies beside the program.
_OFTEN_BESIDE_THE_PROGRAM = ("megatron.core",)
_MAX_FILES = 200


def guess_preimports(program: Program) -> list[str]:
    """Modules of well-known frameworks that the program imports at its top level, directly or through
    modules that lie beside it, in the order found; torch first.

    Names that are not installed are left out. The program's own modules, and whatever lies beside the
    program under a framework's name (except Megatron-LM's checkout), are never returned. A program that
    cannot be read or parsed gives an empty list: the rank itself will say what is wrong with it.
    """
    directory, path = program.import_directory(), program.source_path()
    found: dict[str, None] = {}
    waiting, seen = ([path] if path else []), set[str]()
    while waiting and len(seen) < _MAX_FILES:
        file = waiting.pop(0)
        if file in seen:
            continue
        seen.add(file)
        for name in _top_level_imports(file):
            framework = next((f for f in FRAMEWORKS if name == f or name.startswith(f + ".")), None)
            beside = _file_beside(name, directory)
            if framework and (beside is None or framework in _OFTEN_BESIDE_THE_PROGRAM):
                found[name] = None
            elif beside is not None:
                waiting.append(beside)
    if any(not name.startswith(_WITHOUT_TORCH) for name in found):
        found = dict.fromkeys((*_TORCH, *found))
    with program.import_path():
        return [name for name in found if importlib.util.find_spec(name.partition(".")[0]) is not None]


def _top_level_imports(path: str) -> Iterator[str]:
    """Absolute module names imported when the file is executed: not inside functions, classes included."""
    try:
        with open(path, "rb") as file:
            waiting: list[ast.AST] = [ast.parse(file.read())]
    except (OSError, SyntaxError, ValueError):
        return
    while waiting:
        node = waiting.pop(0)
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module
            # `from package import name` may import a module; a name that is none is not found as a file.
            yield from (
                f"{node.module}.{alias.name}"
                for alias in node.names
                if node.module not in FRAMEWORKS
                and alias.name != "*"
                and not node.module.startswith(tuple(f + "." for f in FRAMEWORKS))
            )
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.expr):
            waiting[:0] = ast.iter_child_nodes(node)


def _file_beside(name: str, directory: str) -> str | None:
    """The source file of an absolute module name below ``directory``; for a package its ``__init__.py``."""
    stem = os.path.join(directory, *name.split("."))
    for path in (stem + ".py", os.path.join(stem, "__init__.py")):
        if os.path.isfile(path):
            return path
    return None
