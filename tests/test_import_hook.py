"""A callback runs when its module has been imported, however often the module was looked up before."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ranklens_core.import_hook import ImportHook

NAME = "ranklens_test_hooked"


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    (tmp_path / f"{NAME}.py").write_text("VALUE = 3\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield NAME
    sys.modules.pop(NAME, None)


def hooked(seen: list[object]) -> ImportHook:
    return ImportHook({NAME: lambda: seen.append(sys.modules[NAME].VALUE)})


def test_called_once_when_the_module_is_there(module: str) -> None:
    seen: list[object] = []
    hook = hooked(seen)
    try:
        imported = importlib.import_module(module)
        assert seen == [3]
        importlib.reload(imported)
        assert seen == [3]
        assert type(imported.__loader__).__module__ != "ranklens_core.import_hook"
    finally:
        hook.remove()


def test_a_program_that_asks_whether_the_module_is_installed_imports_it_later(module: str) -> None:
    """As transformers and accelerate ask for deepspeed."""
    seen: list[object] = []
    hook = hooked(seen)
    try:
        assert importlib.util.find_spec(module) is not None
        assert importlib.util.find_spec(module) is not None
        assert seen == []
        importlib.import_module(module)
        assert seen == [3]
    finally:
        hook.remove()


def test_a_module_that_is_imported_already(module: str) -> None:
    importlib.import_module(module)
    seen: list[object] = []
    hooked(seen).remove()
    assert seen == [3]


def test_nothing_is_called_after_the_hook_is_gone(module: str) -> None:
    seen: list[object] = []
    hook = hooked(seen)
    spec = importlib.util.find_spec(module)
    hook.remove()
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    assert (loaded.VALUE, seen) == (3, [])
