"""The pytest plugin: the same tests pass with all ranks and as one alone; what does not fit says why."""

from __future__ import annotations

import shutil
import sys
import tomllib
from collections.abc import Callable
from importlib import import_module, metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import CliResult, run_command

from ranklens_core.pytest_plugin.marking import Marking, marking_of
from ranklens_core.trace import open_trace

ROOT = Path(__file__).resolve().parents[1]

CONFTEST = """
import random, sys
import pytest
from process_state import ProcessState

def state():
    found = [random.getstate()]
    if "torch" in sys.modules:
        import numpy, torch
        found += [numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist()]
    return found

@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    import numpy, torch  # what a program imports is not undone
    if item.get_closest_marker("ranklens"):
        import ranklens_core.session
    before, numbers = ProcessState.capture(), state()
    yield
    for line in before.changes(ProcessState.capture()):
        print("LEFT", item.name, line, file=sys.__stderr__)
    assert numbers == state()
    return True
"""

TESTS = """
import os
import numpy, pytest, random, torch
import torch.distributed as dist

@pytest.fixture
def job():
    dist.init_process_group("gloo")
    yield dist.get_rank()
    dist.barrier()
    dist.destroy_process_group()

@pytest.fixture(scope="module")
def weights():
    return {"pid": os.getpid(), "weights": torch.arange(3.0)}

@pytest.mark.ranklens("recorded/sum", rank=[0, 2], world_size=3)
def test_sum(job, weights, tmp_path, capsys):
    print("rank", job)
    assert capsys.readouterr().out == f"rank {job}\\n"
    value = weights["weights"] * (job + 1)
    dist.all_reduce(value)
    assert value.tolist() == [0.0, 6.0, 12.0]
    ranks = [torch.zeros(1, dtype=torch.int64) for _ in range(3)]
    dist.all_gather(ranks, torch.tensor([job]))
    assert [rank.item() for rank in ranks] == [0, 1, 2]
    # one tmp_path for all ranks, which outlives each
    (tmp_path / str(job)).touch()
    dist.barrier()
    assert (tmp_path / str(job)).exists()

@pytest.mark.ranklens(rank=1, world_size=2)
@pytest.mark.parametrize("size", [2, 4])
def test_left_initialised(size):
    dist.init_process_group("gloo")
    numbers = torch.tensor([random.random(), numpy.random.rand(), torch.rand(1).item()])
    dist.all_reduce(numbers)
    value = torch.ones(size)
    dist.all_reduce(value)
    assert value.tolist() == [2.0] * size

class TestTraining:
    def setup_method(self):
        dist.init_process_group("gloo")
        torch.manual_seed(3)
        self.model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))

    def teardown_method(self):
        dist.destroy_process_group()

    @pytest.mark.ranklens(rank=1, world_size=2)
    def test_same_gradients(self):
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        for step in range(2):
            optimizer.zero_grad()
            self.model(torch.full((2, 4), float(dist.get_rank() + step))).sum().backward()
            optimizer.step()
        # the mean of 0.5 and 1.5 times two outputs' two rows, in the second step
        assert self.model.module.weight.grad.tolist() == [[3.0] * 4] * 2

def test_unmarked():
    assert "RANK" not in os.environ and not dist.is_initialized()
"""

FAILING = """
import os, pytest, torch, torch.distributed as dist

@pytest.mark.ranklens("recorded/sum", rank=0, world_size=2)
def test_one_rank_fails():
    dist.init_process_group("gloo")
    value = torch.ones(2)
    dist.all_reduce(value)
    if dist.get_rank() == 1:
        print("said by rank 1")
        assert value.tolist() == [2.0, 3.0]
    dist.barrier()

@pytest.mark.ranklens("killed", rank=0, world_size=2)
def test_killed():
    dist.init_process_group("gloo")
    if dist.get_rank() == 1:
        os.kill(os.getpid(), 9)
    dist.barrier()

@pytest.mark.ranklens("left", rank=0, world_size=2)
def test_leaves():
    raise SystemExit(0)

@pytest.mark.ranklens("skipped", rank=0, world_size=2)
def test_skips():
    pytest.skip("no use here")

@pytest.mark.ranklens("skipped", rank=0, world_size=2)
@pytest.mark.skip(reason="marked")
def test_marked_to_be_skipped():
    pass

@pytest.mark.ranklens("foreign", rank=0, world_size=2)
def test_a_directory_of_the_user():
    pass

@pytest.mark.ranklens("unknown", rank=0)
def test_world_size_is_needed():
    pass

@pytest.mark.ranklens("shared", rank=0, world_size=1)
def test_first():
    dist.init_process_group("gloo")

@pytest.mark.ranklens("shared", rank=0, world_size=1)
def test_second():
    pass
"""

STALE = """
import pytest, torch, torch.distributed as dist

@pytest.fixture
def job():
    dist.init_process_group("gloo")
    return dist.get_rank()

@pytest.mark.ranklens("recorded/sum", rank=1)
def test_other_values(job):
    value = torch.arange(3.0) * 7
    dist.all_reduce(value)
    assert value.tolist() == [0.0, 42.0, 84.0]

@pytest.mark.ranklens("recorded/sum", rank=1)
def test_other_integers(job):
    dist.all_reduce(torch.arange(3.0) * 2)
    dist.all_gather([torch.zeros(1, dtype=torch.int64) for _ in range(3)], torch.tensor([5]))
    dist.barrier()
    dist.barrier()

@pytest.mark.ranklens("recorded/sum", rank=1)
def test_other_call(job):
    dist.broadcast(torch.ones(5), 0)

@pytest.mark.ranklens("recorded/sum", rank=1)
def test_fewer_calls(job):
    dist.all_reduce(torch.arange(3.0) * 2)

@pytest.mark.ranklens("recorded/sum", rank=1)
def test_own_failure(job):
    value = torch.arange(3.0) * 2
    dist.all_reduce(value)
    assert value.tolist() == [0.0]

@pytest.mark.ranklens("recorded/nowhere", rank=1)
def test_no_trace(job):
    pass

@pytest.mark.ranklens("recorded/sum", rank=1, world_size=8)
def test_other_world(job):
    pass

@pytest.mark.ranklens("recorded/sum", rank=3)
def test_rank_outside(job):
    pass
"""


def run_pytest(folder: Path, *args: str) -> CliResult:
    """pytest in ``folder``, with nothing of this project's own configuration but the plugin."""
    installed = {entry.name for entry in metadata.entry_points(group="pytest11")}
    plugin = [] if "ranklens" in installed else ["-p", "ranklens_core.pytest_plugin"]
    options = ["--strict-markers", "-c", "pytest.ini", "-p", "no:cacheprovider", *plugin, *args]
    variables = {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "COLUMNS": "300"}
    return run_command([sys.executable, "-m", "pytest", *options], timeout=240, cwd=folder, env=variables)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, CliResult]:
    """A folder with tests and their traces, recorded by two workers; and how that went."""
    folder = tmp_path_factory.mktemp("project")
    (folder / "pytest.ini").write_text("[pytest]\nfilterwarnings = error\n")
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_job.py").write_text(TESTS)
    return folder, run_pytest(folder, "--ranklens-record", "-n2", "--dist=load")


def sections(result: CliResult) -> dict[str, str]:
    """The text of each failure by the test's name."""
    found: dict[str, str] = {}
    name = ""
    for line in result.stdout.splitlines():
        if line.startswith("____"):
            name = line.strip("_ ")
        elif line.startswith("===="):
            name = ""
        elif name:
            found[name] = found.get(name, "") + line + "\n"
    return found


def test_all_ranks_then_one_alone(recorded: tuple[Path, CliResult]) -> None:
    folder, recording = recorded
    assert recording.returncode == 0, recording.stdout + recording.stderr
    assert "6 passed" in recording.stdout
    traces = {str(run.parent.relative_to(folder)) for run in folder.rglob("run.json")}
    assert traces == {
        "recorded/sum",
        "traces/test_job/test_left_initialised[2]",
        "traces/test_job/test_left_initialised[4]",
        "traces/test_job/TestTraining.test_same_gradients",
    }
    assert not [path for path in folder.rglob(".*") if path.parent != folder]
    assert not list(folder.rglob("trace"))
    with open_trace(folder / "recorded" / "sum") as trace:
        assert (trace.world_size, trace.run.program) == (3, "pytest test_job.py::test_sum")
        assert trace.missing == ()

    alone = run_pytest(folder)
    assert alone.returncode == 0, alone.stdout + alone.stderr
    assert "6 passed" in alone.stdout
    assert [line for line in alone.stderr.splitlines() if line.startswith("LEFT")] == []


def test_what_does_not_fit_its_trace(recorded: tuple[Path, CliResult], tmp_path: Path) -> None:
    folder, _ = recorded
    for name in ("pytest.ini", "conftest.py"):
        shutil.copy(folder / name, tmp_path)
    shutil.copytree(folder / "recorded", tmp_path / "recorded")
    (tmp_path / "test_stale.py").write_text(STALE)
    result = run_pytest(tmp_path)
    failed = sections(result)
    assert result.returncode == 1
    assert len(failed) == 8, result.stdout + result.stderr

    for name in ("test_other_values", "test_other_integers", "test_other_call", "test_fewer_calls"):
        assert "The trace was recorded by `pytest test_job.py::test_sum`" in failed[name]
        assert f"next                pytest test_stale.py::{name} --ranklens-record" in failed[name]
        assert "Traceback" not in failed[name]
    assert "it sends other values than were recorded" in failed["test_other_values"]
    assert "input 0 of all_reduce 0 on group (ranks 0-2)" in failed["test_other_values"]
    assert "assert [0.0, 6.0, 12.0] == [0.0, 42.0, 84.0]" in failed["test_other_values"]
    assert "input 0 of all_gather 1 on group (ranks 0-2)" in failed["test_other_integers"]
    assert "its calls are not the recorded ones" in failed["test_other_call"]
    assert "op: recorded all_reduce, now broadcast" in failed["test_other_call"]
    assert "test_stale.py:23 test_other_call" not in failed["test_fewer_calls"]
    assert "the program ended 3 calls early" in failed["test_fewer_calls"]

    assert "assert [0.0, 6.0, 12.0] == [0.0]" in failed["test_own_failure"]
    assert "do not fit" not in failed["test_own_failure"]
    assert "1 of 1 inputs identical" in failed["test_own_failure"]

    command = "pytest test_stale.py::test_no_trace --ranklens-record"
    assert failed["test_no_trace"].strip() == f"There is no trace at recorded/nowhere. Record it: {command}"
    assert "world_size=8, but recorded/sum was recorded with 3 ranks" in failed["test_other_world"]
    assert "its world has 3 ranks, 0 to 2" in failed["test_rank_outside"]


def test_a_recording_that_fails_keeps_what_was_there(
    recorded: tuple[Path, CliResult], tmp_path: Path
) -> None:
    folder, _ = recorded
    (tmp_path / "pytest.ini").touch()
    shutil.copytree(folder / "recorded", tmp_path / "recorded")
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "thesis.txt").write_text("years of work")
    (tmp_path / "test_failing.py").write_text(FAILING)
    before = {path: path.stat() for path in tmp_path.rglob("*")}
    result = run_pytest(tmp_path, "--ranklens-record")
    failed = sections(result)
    assert result.returncode == 1
    assert set(failed) == {
        "test_one_rank_fails",
        "test_killed",
        "test_leaves",
        "test_a_directory_of_the_user",
        "test_world_size_is_needed",
        "test_second",
    }, result.stdout + result.stderr
    assert "1 passed, 2 skipped" in result.stdout

    text = failed["test_one_rank_fails"]
    assert "rank 1 of 2 failed first, and the trace recorded/sum is as it was." in text
    assert (
        ">           assert value.tolist() == [2.0, 3.0]\nE           assert [2.0, 2.0] == [2.0, 3.0]" in text
    )
    assert "test_failing.py:11: AssertionError" in text
    assert "[rank 1] said by rank 1" in text
    assert "killed by signal 9 (SIGKILL)" in failed["test_killed"]
    assert "the trace killed was not made" in failed["test_killed"]
    assert "SystemExit: 0" in failed["test_leaves"]
    assert "foreign holds thesis.txt, which is no part of a trace" in failed["test_a_directory_of_the_user"]
    assert "give the marker world_size=N" in failed["test_world_size_is_needed"]
    assert "shared has just been recorded by test_failing.py::test_first" in failed["test_second"]

    after = {path: path.stat() for path in tmp_path.rglob("*") if "__pycache__" not in path.parts}
    new = {path.relative_to(tmp_path).parts[0] for path in after.keys() - before.keys()}
    assert new == {"shared"}
    unchanged = {path: stat.st_mtime_ns for path, stat in before.items() if path.is_file()}
    assert {path: after[path].st_mtime_ns for path in unchanged} == unchanged


def test_pytest_starts_without_torch(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").touch()
    (tmp_path / "conftest.py").write_text(
        "import sys\n"
        "def pytest_unconfigure():\n"
        "    names = {name.split('.')[0] for name in sys.modules}\n"
        "    print('IMPORTED', sorted(names & {'torch', 'numpy', 'pyarrow', 'msgspec', 'ranklens_core'}))\n"
    )
    (tmp_path / "test_plain.py").write_text(
        "import pytest\n"
        "def test_plain(): pass\n"
        "@pytest.mark.ranklens(rank=[0, 1], world_size=2)\n"
        "def test_marked(): pass\n"
    )
    result = run_pytest(tmp_path, "--collect-only", "-q")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "test_plain.py::test_marked[rank1]" in result.stdout
    assert "IMPORTED ['ranklens_core']" in result.stdout


class Node:
    """As much of a test as a marker is read from."""

    nodeid = "test_it.py::test_x"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._mark = SimpleNamespace(args=args, kwargs=kwargs)

    def get_closest_marker(self, name: str) -> SimpleNamespace:
        assert name == "ranklens"
        return self._mark


def read(*args: Any, **kwargs: Any) -> Marking | None:
    return marking_of(Node(*args, **kwargs))  # type: ignore[arg-type]


def test_a_marker_as_it_is_read() -> None:
    swept = read(Path("a/b"), rank=range(2), world_size=2, payload=[0, 1])
    assert swept == Marking("a/b", (0, 1), True, 2, "0,1", False)
    assert read(trace="t", rank=5, cpu=True) == Marking("t", (5,), False, None, "all", True)


@pytest.mark.parametrize(
    ("marker", "message"),
    [
        (lambda: read("t"), "rank is missing"),
        (lambda: read("t", rnak=1), "there is no argument 'rnak'"),
        (lambda: read("t", 1), "2 arguments without a name"),
        (lambda: read("t", trace="u", rank=1), "the trace is there twice"),
        (lambda: read(5, rank=1), "trace is 5, not the path of a directory"),
        (lambda: read("", rank=1), "trace is '', not"),
        (lambda: read("t", rank="1"), "rank is '1', not a rank"),
        (lambda: read("t", rank=True), "rank is True, not a rank"),
        (lambda: read("t", rank=-1), "rank is -1, not a rank"),
        (lambda: read("t", rank=[]), "rank is [], not a rank"),
        (lambda: read("t", rank=[1, 1]), "rank is [1, 1], not"),
        (lambda: read("t", rank=2, world_size=2), "outside a world of 2 (0 to 1)"),
        (lambda: read("t", rank=0, world_size=0), "world_size is 0, not a number of ranks"),
        (lambda: read("t", rank=0, payload="0"), "payload is '0', not 'all' or a list"),
        (lambda: read("t", rank=[0, 3], payload=[0]), "without the values of rank 3"),
        (lambda: read("t", rank=0, cpu=1), "cpu is 1, not True or False"),
    ],
)
def test_a_wrong_marker_names_test_and_argument(marker: Callable[[], Marking], message: str) -> None:
    with pytest.raises(pytest.fail.Exception) as caught:
        marker()
    assert message in str(caught.value)
    assert str(caught.value).startswith("test_it.py::test_x: @pytest.mark.ranklens: ")
    assert "rank, world_size=None" in str(caught.value)


def test_pytest_finds_the_plugin() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    module = project["entry-points"]["pytest11"]["ranklens"]
    assert import_module(module).pytest_addoption
