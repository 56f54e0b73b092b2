"""The autouse check of conftest.py can fail: each kind of leak is found and named."""

from __future__ import annotations

import builtins
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest
from process_state import ProcessState


def changes(leak: Callable[[], object]) -> str:
    before = ProcessState.capture()
    leak()
    return "\n".join(before.changes(ProcessState.capture()))


def test_nothing_changed_is_no_change() -> None:
    assert changes(lambda: None) == ""


def test_environment_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "os.environ['RANK']: was None, is '5'" in changes(lambda: monkeypatch.setenv("RANK", "5"))


def test_arguments_and_working_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: os.PathLike[str]) -> None:
    assert "sys.argv" in changes(lambda: monkeypatch.setattr(sys, "argv", ["train.py"]))
    assert "working directory" in changes(lambda: monkeypatch.chdir(tmp_path))


def test_patched_builtin(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "builtins.print is another function" in changes(
        lambda: monkeypatch.setattr(builtins, "print", lambda *args: None)
    )


def test_signal_handler() -> None:
    old = signal.getsignal(signal.SIGTERM)
    try:
        assert "handler of SIGTERM" in changes(lambda: signal.signal(signal.SIGTERM, lambda *args: None))
    finally:
        signal.signal(signal.SIGTERM, old)


@pytest.mark.parametrize(("name", "daemon"), [("someone's", False), ("ranklens-writer", True)])
def test_thread(name: str, daemon: bool) -> None:
    release = threading.Event()
    thread = threading.Thread(target=release.wait, name=name, daemon=daemon)
    try:
        assert f"thread {name!r} is still alive" in changes(thread.start)
    finally:
        release.set()
        thread.join()


def test_child_process() -> None:
    children: list[subprocess.Popen[bytes]] = []
    command = [sys.executable, "-c", "input()"]
    try:
        found = changes(lambda: children.append(subprocess.Popen(command, stdin=subprocess.PIPE)))
        assert f"child process {children[0].pid} was not waited for" in found
    finally:
        for child in children:
            child.communicate(b"\n")


def test_patched_torch_function(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    for module, name in [(torch.distributed, "init_process_group"), (torch.cuda, "is_available")]:
        found = changes(lambda module=module, name=name: monkeypatch.setattr(module, name, lambda: None))
        assert f"{module.__name__}.{name} is another function" in found


def test_torch_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    old = torch.get_default_dtype()
    try:
        assert "torch.get_default_dtype()" in changes(lambda: torch.set_default_dtype(torch.float64))
    finally:
        torch.set_default_dtype(old)


def test_process_group() -> None:
    import torch.distributed as dist

    store = dist.HashStore()
    try:
        assert "torch.distributed.is_initialized(): was False, is True" in changes(
            lambda: dist.init_process_group("gloo", rank=0, world_size=1, store=store)
        )
    finally:
        dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore:(?s).*Overriding a previously registered kernel:UserWarning")
def test_kernel() -> None:
    import torch

    library = torch.library.Library("c10d", "IMPL")
    try:
        assert "c10d::barrier has another kernel: CPU" in changes(
            lambda: library.impl("barrier", lambda *args: None, "CPU", allow_override=True)
        )
    finally:
        library._destroy()


def test_kernel_left_by_a_test_that_imported_torch_itself(
    run_python: Callable[..., tuple[int, str, str]],
) -> None:
    status, stdout, stderr = run_python(
        f"import sys; sys.path.insert(0, {os.path.dirname(__file__)!r})\n"
        "from process_state import ProcessState\n"
        "before = ProcessState.capture()\n"
        "assert 'torch' not in sys.modules\n"
        "import torch\n"
        "print('clean:', before.changes(ProcessState.capture()))\n"
        "library = torch.library.Library('c10d', 'IMPL')\n"
        "library.impl('barrier', lambda *args: None, 'CPU', allow_override=True)\n"
        "print('leak:', before.changes(ProcessState.capture()))\n"
    )
    assert status == 0, stderr
    assert "clean: []" in stdout
    assert "c10d::barrier has another kernel" in stdout.split("leak:")[1]


def test_a_command_that_takes_too_long_is_ended_with_its_children(run_python: Callable[..., object]) -> None:
    source = "import os, signal; os.fork(); signal.pause()"
    with pytest.raises(pytest.fail.Exception, match="took more than 1 s"):
        run_python(source, timeout=1)


PATCHING = """
import os, sys
sys.path.insert(0, os.path.dirname({tests!r}))
sys.path.insert(0, {tests!r})
from types import ModuleType
from ranklens_core.patches import Patches

patched = []
set_attribute = Patches.set

def noting(self, owner, name, value):
    patched.append((owner, name, value))
    set_attribute(self, owner, name, value)

Patches.set = noting
os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", DS_ACCELERATOR="cpu")
import ranklens_core as ranklens
from ranklens_core.standin import cpu_cuda_context
import torch.distributed as dist
{framework}

with cpu_cuda_context({cpu_cuda}), ranklens.record("trace"):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    dist.all_reduce(__import__("torch").ones(1))
    dist.destroy_process_group()
with ranklens.replay("trace", rank=0):
    dist.init_process_group("nccl")
    dist.all_reduce(__import__("torch").ones(1))
    dist.destroy_process_group()

from process_state import watched
places = list(watched().values())
for owner, name, value in patched:
    is_code = callable(value) or isinstance(value, (property, classmethod, staticmethod))
    if is_code and isinstance(owner, (ModuleType, type)) and not any(owner is place for place in places):
        print("unwatched", getattr(owner, "__module__", ""), owner.__name__, name)
print("patched", len(patched))
"""


@pytest.mark.parametrize(
    ("framework", "cpu_cuda"),
    [
        ("import megatron.core.pipeline_parallel.schedules, megatron.core.optimizer", True),
        ("import deepspeed", False),
    ],
)
def test_every_place_that_ranklens_patches_is_watched(
    framework: str, cpu_cuda: bool, run_python: Callable[..., tuple[int, str, str]]
) -> None:
    pytest.importorskip(framework.split()[1].split(".")[0])
    tests = os.path.dirname(os.path.abspath(__file__))
    source = PATCHING.format(tests=tests, framework=framework, cpu_cuda=cpu_cuda)
    status, stdout, stderr = run_python(source)
    assert status == 0, stderr
    *unwatched, count = stdout.splitlines()
    assert "\n".join(line for line in unwatched if line.startswith("unwatched")) == ""
    assert int(count.removeprefix("patched ")) > 20
