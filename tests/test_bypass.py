"""Communication past torch.distributed is seen when it is used, and not when it is only imported."""

from __future__ import annotations

import builtins
import ctypes
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from conftest import RunCli

from ranklens_core import bypass
from ranklens_core.bypass import LIBRARIES, Bypasses, refuse
from ranklens_core.errors import UnsupportedError

FAKE_LIBRARIES = {
    "transformer_engine/pytorch/module/base.py": "def initialize_ub(*args): return 'buffers'\n",
    "transformer_engine/pytorch/module/__init__.py": "from .base import initialize_ub\n",
    "transformer_engine/pytorch/__init__.py": "from .module import initialize_ub\n",
    "deep_ep/buffer.py": "class Buffer:\n    def __init__(self, group): self.group = group\n",
    "deep_ep/__init__.py": "from .buffer import Buffer\n",
    "nvshmem/core/init_fini.py": "def init(**kwargs): return 'pool'\n",
    "nvshmem/core/__init__.py": "from .init_fini import init\n",
    "vllm/distributed/device_communicators/pynccl.py": (
        "class PyNcclCommunicator:\n    def __init__(self, group): self.group = group\n"
    ),
    "nccl/core/communicator.py": (
        "class Communicator:\n    @classmethod\n    def init(cls, ranks): return cls()\n"
    ),
    "mscclpp/comm.py": "class CommGroup:\n    def __init__(self, ranks): self.ranks = ranks\n",
    "mpi4py/MPI.py": (
        "class Intracomm:\n"
        "    def __init__(self, other=None): pass\n"
        "    def Get_rank(self): return 3\n"
        "    def allreduce(self, value): return value\n"
        "COMM_WORLD = Intracomm()\n"
    ),
}


@pytest.fixture
def fake_libraries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The libraries' entry points as Python files, first on the path; forgotten afterwards."""
    home = tmp_path / "site"
    for name, source in FAKE_LIBRARIES.items():
        file = home / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(source)
    before = set(sys.modules)
    monkeypatch.syspath_prepend(home)
    yield home
    tops = {name.split("/")[0] for name in FAKE_LIBRARIES}
    for name in set(sys.modules) - before:
        if name.split(".")[0] in tops:
            del sys.modules[name]


class Told:
    def __init__(self) -> None:
        self.uses: list[tuple[str, str]] = []

    def __call__(self, name: str, message: str) -> None:
        self.uses.append((name, message))


IMPORT_AND_USE = [
    (
        "Transformer Engine userbuffers",
        "from transformer_engine.pytorch import initialize_ub",
        "initialize_ub([8, 8])",
    ),
    ("DeepEP", "from deep_ep import Buffer", "Buffer(None)"),
    ("NVSHMEM", "from nvshmem.core import init", "init(rank=0)"),
    (
        "own NCCL communicator",
        "from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator as C",
        "C(None)",
    ),
    ("own NCCL communicator", "from nccl.core.communicator import Communicator as C", "C.init(8)"),
    ("MSCCL++", "from mscclpp.comm import CommGroup", "CommGroup(8)"),
    ("own MPI communicator", "from mpi4py import MPI", "MPI.COMM_WORLD.allreduce(1)"),
]


@pytest.mark.parametrize(("name", "importing", "using"), IMPORT_AND_USE)
@pytest.mark.parametrize("imported_first", [False, True])
@pytest.mark.usefixtures("fake_libraries")
def test_use_is_seen_and_import_is_no_alarm(
    name: str, importing: str, using: str, imported_first: bool
) -> None:
    told = Told()
    namespace: dict[str, Any] = {}
    run = builtins.exec
    if imported_first:
        run(importing, {})
    bypasses = Bypasses(told)
    try:
        run(importing, namespace)
        assert (told.uses, bypasses.used) == ([], [])
        run(using, namespace)
        run(using, namespace)
    finally:
        bypasses.remove()
    assert bypasses.used == [name]
    assert [use[0] for use in told.uses] == [name, name]
    assert "goes past torch.distributed" in told.uses[0][1]


@pytest.mark.usefixtures("fake_libraries")
def test_asking_mpi_for_the_rank_reaches_nobody() -> None:
    bypasses = Bypasses(refuse)
    try:
        from mpi4py import MPI  # type: ignore[import-not-found]

        assert MPI.COMM_WORLD.Get_rank() == 3
        assert isinstance(MPI.COMM_WORLD, MPI.Intracomm)
        with pytest.raises(
            UnsupportedError, match=r"own MPI communicator \(mpi4py.MPI.COMM_WORLD.allreduce\)"
        ):
            MPI.COMM_WORLD.allreduce(1)
    finally:
        bypasses.remove()
    assert type(MPI.COMM_WORLD) is MPI.Intracomm


def test_symmetric_memory_of_torch() -> None:
    import torch.distributed._symmetric_memory as symmetric

    before = symmetric.rendezvous
    bypasses = Bypasses(refuse)
    try:
        with pytest.raises(UnsupportedError, match="symmetric memory"):
            symmetric.enable_symm_mem_for_group("0")
        assert bypasses.used == ["symmetric memory"]
    finally:
        bypasses.remove()
    assert symmetric.rendezvous is before


def test_a_function_called_through_ctypes(monkeypatch: pytest.MonkeyPatch) -> None:
    import re

    monkeypatch.setattr(bypass, "NATIVE", (("own NCCL communicator", re.compile("abs")),))
    told = Told()
    bypasses = Bypasses(told)
    try:
        libc = ctypes.CDLL(None)
        function = libc.abs  # binding is no use
        function.restype = ctypes.c_int
        assert not told.uses
        assert function(-3) == 3
        assert libc.labs(-4) == 4
    finally:
        bypasses.remove()
    assert [name for name, _ in told.uses] == ["own NCCL communicator"]
    assert ctypes.CDLL(None).abs(-3) == 3


def test_a_class_written_in_c_is_replaced_by_a_subclass(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("cupy_backends.cuda.libs.nccl")
    vars(module)["NcclCommunicator"] = complex  # any class whose attributes cannot be set
    monkeypatch.setitem(sys.modules, module.__name__, module)
    told = Told()
    bypasses = Bypasses(told)
    try:
        assert isinstance(vars(module)["NcclCommunicator"](1, 2), complex)
    finally:
        bypasses.remove()
    assert told.uses[0][0] == "own NCCL communicator"
    assert vars(module)["NcclCommunicator"] is complex


def test_an_unknown_version_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "deep_ep.buffer", ModuleType("deep_ep.buffer"))
    with caplog.at_level("INFO", "ranklens"):
        Bypasses(refuse).remove()
    assert "whether DeepEP is used goes unseen" in caplog.text


def test_every_library_says_what_to_do_instead() -> None:
    assert {library.name for library in LIBRARIES} >= {
        "Transformer Engine userbuffers",
        "DeepEP",
        "NVSHMEM",
        "symmetric memory",
        "DeepCompile",
        "own NCCL communicator",
    }
    assert all(library.remedy and library.entries for library in LIBRARIES)


PROGRAM = """
import os, sys
import torch, torch.distributed as dist
from deep_ep import Buffer
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(4))
try:
    Buffer(dist.group.WORLD)
except Exception as error:
    if "swallow" not in sys.argv:
        raise
dist.destroy_process_group()
"""


@pytest.mark.parametrize("argument", ["pass on", "swallow"])
def test_recorded_with_a_warning_and_refused_in_a_replay(
    argument: str, fake_libraries: Path, run_cli: RunCli, tmp_path: Path
) -> None:
    program = tmp_path / "train.py"
    program.write_text(PROGRAM)
    env = {"PYTHONPATH": f"{fake_libraries}:{Path(__file__).parents[1]}"}
    recorded = run_cli("record", "--nproc", "2", "--out", "trace", "--", program, argument, env=env)
    assert recorded.returncode == 0, recorded.stderr
    assert "communicates by DeepEP" in recorded.stderr
    verdict = tmp_path / "verdict.json"
    replayed = run_cli(
        "replay", "trace", "--rank", "1", "--verdict", verdict, "--", program, argument, env=env
    )
    assert replayed.returncode == 6, replayed.stderr
    judged = json.loads(verdict.read_text())
    assert (judged["status"], judged["bypassed"]) == ("unsupported", ["DeepEP"])
    assert "bypassed            DeepEP" in replayed.stderr


DEEP_COMPILE = """
from ranklens_core.bypass import Bypasses, refuse
bypasses = Bypasses(refuse)
import deepspeed
from deepspeed.compile.util import get_deepcompile_handle
assert bypasses.used == []
try:
    get_deepcompile_handle()
except Exception as error:
    print(type(error).__name__, bypasses.used)
"""


def test_deepcompile(run_python: Any) -> None:
    result = run_python(DEEP_COMPILE)
    assert result.stdout.splitlines()[-1:] == ["UnsupportedError ['DeepCompile']"], result.stderr
