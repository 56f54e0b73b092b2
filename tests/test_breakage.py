"""Careless and hostile use: every fault that an attempt to break RankLens has shown stays repaired."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from conftest import CliResult, RunCli, run_command
from trace_samples import GROUP, RUN, SIGNATURE, call, completion, header, write_trace

import ranklens_core as ranklens
from ranklens_core import environment, hash_seed
from ranklens_core.clock import ManualClock
from ranklens_core.errors import TraceDamagedError, TraceError
from ranklens_core.patches import Patches
from ranklens_core.place import RankEnvironment
from ranklens_core.printed import PrintedMetrics
from ranklens_core.record_session import LINGER_NS, RecordSession
from ranklens_core.schema import EnvironmentItem
from ranklens_core.trace import TraceWriter, content_address, open_trace, verify

TRAIN = """
import os, sys, torch, torch.distributed as dist
torch.manual_seed(1)
def train(steps=3):
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        loss = model(torch.randn(2, 2)).square().mean()
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        print(f"loss {loss.item():.9f}", flush=True)
dist.init_process_group("gloo")
"""
CALLS = 6  # 3 steps x 2 parameters

CHDIR = "os.makedirs('elsewhere', exist_ok=True); os.chdir('elsewhere')\n"
FORK = """
if os.fork() == 0:
    sys.exit(3)
print("child", os.wait()[1] >> 8, flush=True)
"""
SETS = """
order = [word for word in {"a", "bb", "ccc", "dddd", "eeeee", "ffffff", "ggggggg"}]
for word in order:
    dist.all_reduce(torch.ones(len(word)))
"""

RunProgram = Callable[..., CliResult]


@pytest.fixture
def record(run_cli: RunCli, tmp_path: Path) -> RunProgram:
    """``record(source, *options)``: record one rank of TRAIN + ``source`` into ``trace``."""

    def run(source: str, *options: str) -> CliResult:
        (tmp_path / "program.py").write_text(TRAIN + source)
        return run_cli("record", "--nproc", "1", "--out", "trace", *options, "--", "program.py")

    return run


@pytest.fixture
def replay(run_cli: RunCli) -> RunProgram:
    """``replay(*options)``: replay what ``record`` recorded."""
    return lambda *options: run_cli("replay", "trace", "--rank", "0", *options, "--", "program.py")


@pytest.mark.parametrize(
    ("source", "calls"),
    [
        pytest.param(f"{CHDIR}{FORK}{SETS}train(); sys.stdout.flush(); os._exit(0)", CALLS + 7, id="os-exit"),
        pytest.param("train(); sys.stdout.close(); sys.stderr = None", CALLS, id="closed-output"),
        pytest.param("train(); sys.argv = []; del sys.stderr; sys.exit(0)", CALLS, id="deleted-output"),
    ],
)
def test_a_careless_program_is_recorded_whole_and_replayed_alike(
    source: str, calls: int, record: RunProgram, replay: RunProgram, tmp_path: Path
) -> None:
    recorded = record(source)
    assert (recorded.returncode, "Traceback" in recorded.stderr) == (0, False), recorded.stderr
    assert verify(tmp_path / "trace").ok
    replayed = replay("--verdict", "verdict.json")
    assert (replayed.returncode, "Traceback" in replayed.stderr) == (0, False), replayed.stderr
    assert replayed.stderr.count("calls match") == 1
    verdict = json.loads((tmp_path / "verdict.json").read_text())
    assert (verdict["status"], verdict["calls"]) == ("ok", {"recorded": calls, "replayed": calls})


def test_a_program_that_leaves_early_by_os_exit_is_judged(
    record: RunProgram, replay: RunProgram, tmp_path: Path
) -> None:
    assert record("train()").returncode == 0
    (tmp_path / "program.py").write_text(TRAIN + "train(2); os._exit(0)")
    replayed = replay()
    assert (replayed.returncode, "the program ended 2 calls early" in replayed.stderr) == (3, True)


def test_a_program_that_catches_the_end_of_the_window_has_not_mismatched(
    record: RunProgram, replay: RunProgram
) -> None:
    assert record("try: train(4)\nexcept BaseException: pass\n", "--steps", "0:2").returncode == 0
    replayed = replay()
    assert (replayed.returncode, "4 of 4 calls match" in replayed.stderr) == (0, True), replayed.stderr


def test_closed_standard_streams_are_no_trap(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(TRAIN + "train(); print('not to be seen', file=sys.stderr)")
    command = f"{shlex.quote(sys.executable)} -m ranklens_core"
    for line in (
        f"{command} record --nproc 2 --out trace -- program.py <&- >&- 2>&-",
        f"{command} replay trace --rank 1 -- program.py <&- >&- 2>&-",
    ):
        result = run_command(["sh", "-c", line], timeout=120, cwd=tmp_path, env=None)
        assert result == (0, "", "")
    assert verify(tmp_path / "trace").ok


def test_torchs_own_wrapper_for_debugging_is_not_asked_of_peers(
    record: RunProgram, replay: RunProgram, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
    assert record("train(); print(dist.get_debug_level(), flush=True)").returncode == 0
    replayed = replay()
    assert (replayed.returncode, f"{CALLS} of {CALLS} calls" in replayed.stderr) == (0, True), replayed.stderr
    assert replayed.stdout.endswith("DebugLevel.DETAIL\n")


def test_a_verdict_file_that_cannot_be_written_is_told_before_the_replay(
    record: RunProgram, replay: RunProgram, tmp_path: Path
) -> None:
    assert record("train()").returncode == 0
    replayed = replay("--verdict", "nowhere/verdict.json")
    assert (replayed.returncode, replayed.stdout) == (2, "")
    assert "--verdict nowhere/verdict.json cannot be written" in replayed.stderr


def test_the_next_command_can_be_pasted(run_cli: RunCli, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(TRAIN + "train()")
    out = "my trace's $(x) ü"
    assert run_cli("record", "--nproc", "1", "--out", out, "--", "program.py").returncode == 0
    replayed = run_cli("replay", out, "--rank", "0", "--", "program.py")
    assert replayed.returncode == 0, replayed.stderr
    words = shlex.split(replayed.stderr.splitlines()[-1])
    assert words[:4] == ["next", "ranklens", "replay", out]


def test_overwriting_the_trace_of_a_started_job_replaces_run_json_too(
    run_cli: RunCli, tmp_path: Path
) -> None:
    (tmp_path / "program.py").write_text(TRAIN + "train()")
    options = ("record", "--payload", "all", "--out", "trace", "--overwrite", "--", "program.py")
    ports = ("29811", "29812")  # what the run id of such a job is made of
    run_ids = []
    for port in ports:
        place = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        assert run_cli(*options, env=place).returncode == 0
        assert verify(tmp_path / "trace").ok
        run_ids.append(open_trace(tmp_path / "trace").run.run_id)
    assert run_ids[0] != run_ids[1]


@pytest.mark.parametrize("options", [("--nproc", "0"), ("--nproc", "2", "--payload", "")])
def test_a_refused_recording_leaves_nothing(
    options: tuple[str, ...], run_cli: RunCli, tmp_path: Path
) -> None:
    (tmp_path / "program.py").write_text(TRAIN)
    result = run_cli("record", *options, "--out", "trace", "--", "program.py")
    assert (result.returncode, (tmp_path / "trace").exists()) == (2, False)


def test_a_pipe_in_the_place_of_a_file_is_no_trap(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "trace")
    calls = trace / "rank-00000" / "calls.arrows"
    calls.unlink()
    os.mkfifo(calls)
    with pytest.raises(TraceError, match="no regular file"):
        _ = open_trace(trace).rank(0).calls


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"in_dtypes": ("float32", "float32")}, "2 input dtypes and 1 shapes"),
        ({"out_dtypes": ()}, "0 output dtypes and 1 shapes"),
        ({"op": "broadcast", "group": GROUP.key, "peer": 77}, "peer 77 in a group of 2"),
    ],
)
def test_a_signature_that_contradicts_itself_is_damage(
    change: dict[str, object], says: str, tmp_path: Path
) -> None:
    writer = TraceWriter(tmp_path, RUN, header(0))
    writer.group(GROUP)
    writer.signature(msgspec.structs.replace(SIGNATURE, **change))
    writer.close(0)
    with pytest.raises(TraceDamagedError, match=says):
        _ = open_trace(tmp_path).rank(0).signatures


def test_a_value_of_another_size_than_its_tensor_is_damage(run_cli: RunCli, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(TRAIN + "dist.all_reduce(torch.ones(4))")
    signature = msgspec.structs.replace(
        SIGNATURE, op="all_reduce", group="0,1", reduce_op="sum", in_shapes=((4,),), out_shapes=((4,),)
    )
    data = bytes(8)
    writer = TraceWriter(tmp_path / "trace", RUN, header(0))
    writer.group(msgspec.structs.replace(GROUP, key="0,1"))
    writer.signature(signature)
    writer.call(call(0))
    writer.store(content_address(data), data)
    writer.completion(completion(0, out_addresses=(content_address(data),)))
    writer.close(0)
    replayed = run_cli("replay", "trace", "--rank", "0", "--", "program.py")
    assert (replayed.returncode, "has 8 bytes, not 16" in replayed.stderr) == (5, True), replayed.stderr


def test_a_group_without_the_rank_that_recorded_it_is_damage(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path, RUN, header(0))
    writer.group(msgspec.structs.replace(GROUP, ranks=(5, 6)))
    writer.close(0)
    with pytest.raises(TraceDamagedError, match="rank 0 is not in its own group"):
        open_trace(tmp_path).rank(0)


@pytest.mark.parametrize(
    "item",
    [
        ("threads", "torch threads", "100000000"),
        ("threads", "torch threads", "-3"),
        ("random", "python random", "["),
        ("random", "python random", "[" * 100_000),
        ("random", "numpy random", '["PCG64", [1], 5, 0, 0.0]'),
        ("random", "torch random", "eHh4"),
    ],
)
def test_a_setting_that_was_never_recorded_is_damage(item: tuple[str, str, str]) -> None:
    kind, name, value = item
    with Patches() as patches, pytest.raises(TraceDamagedError, match=name):
        environment.restore([EnvironmentItem(kind=kind, name=name, value=value)], patches)


@pytest.mark.parametrize(
    ("name", "restored"),
    [
        ("HIDDEN_SIZE", True),
        ("PROFILE", True),
        ("CALIBRATE", True),
        ("TORCHINDUCTOR_CACHE_DIR", False),
        ("TRITON_CACHE_DIR", False),
        ("TORCH_HOME", False),
        ("HF_MODULES_CACHE", False),
        ("GCONV_PATH", False),
        ("LOCPATH", False),
        ("NCCL_CONF_FILE", False),
        ("OMP_TOOL_LIBRARIES", False),
        ("BASH_ENV", False),
        ("CFLAGS", False),
        ("EDITOR", False),
        ("ld_preload", False),
        ("PYTHONHASHSEED", False),  # python has read it: setting it would only seem to help
        ("A=B", False),
        ("", False),
        ("NUL\0", False),
    ],
)
def test_a_trace_sets_numbers_and_switches_only(
    name: str, restored: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name and not set(name) & set("=\0"):
        monkeypatch.delenv(name, raising=False)
    with Patches() as patches:
        differences = environment.restore([EnvironmentItem(kind="variable", name=name, value="7")], patches)
        assert (name in os.environ) is restored
    assert [difference.restored for difference in differences] == [restored]


@pytest.mark.parametrize(
    ("orig_argv", "argv", "own"),
    [
        (["python", "-m", "ranklens_core", "info"], ["/x/__main__.py", "info"], True),
        (["python", "-u", "-m", "ranklens_core", "info"], ["/x/__main__.py", "info"], True),
        (["python", "/bin/ranklens", "info", "d"], ["/bin/ranklens", "info", "d"], True),
        (["python", "-m", "debugpy", "-m", "ranklens_core", "info"], ["/x/__main__.py", "info"], False),
        (["python", "-m", "pytest", "tests"], ["/x/pytest.py", "tests"], False),
        (["python", "coverage", "run", "-m", "ranklens_core", "info"], ["/x/__main__.py", "info"], False),
        (["python"], [""], False),
    ],
)
def test_only_the_plain_command_starts_over(
    orig_argv: list[str], argv: list[str], own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[tuple[str, list[str], str]] = []
    monkeypatch.setattr(sys, "orig_argv", orig_argv)
    monkeypatch.setattr(sys, "argv", argv)
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    monkeypatch.setattr(
        os, "execv", lambda path, args: started.append((path, args, os.environ["PYTHONHASHSEED"]))
    )
    monkeypatch.setenv("PYTHONHASHSEED", "random")
    hash_seed.fix_hash_seed("41")
    assert started == ([(sys.executable, orig_argv, "41")] if own else [])


@pytest.mark.parametrize("recorded", ["7", "random", "-1", "4294967296", "evil", ""])
def test_what_is_no_other_seed_starts_nothing(recorded: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "ranklens_core"])
    monkeypatch.setattr(sys, "argv", ["/x/__main__.py"])
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    monkeypatch.setattr(os, "execv", lambda *_: pytest.fail("started over"))
    hash_seed.fix_hash_seed(recorded)


def test_a_word_before_os_exit_and_none_in_a_forked_child(tmp_path: Path) -> None:
    source = (
        "import os\n"
        "from ranklens_core.leaving import before_exit\n"
        "from ranklens_core.patches import Patches\n"
        "def last(status):\n"
        "    print('last', status, flush=True)\n"
        "    return 5\n"
        "before_exit(Patches(), last)\n"
        "if os.fork() == 0: os._exit(4)\n"
        "print('child', os.wait()[1] >> 8, flush=True)\n"
        "os._exit(0)\n"
    )
    result = run_command([sys.executable, "-c", source], timeout=60, cwd=tmp_path, env=None)
    assert (result.returncode, result.stdout) == (5, "child 4\nlast 0\n")


def test_no_standard_output_is_nothing_to_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    watching = PrintedMetrics(lambda _: pytest.fail("nothing was printed"), lambda: 0)
    watching.remove()
    assert sys.stdout is None


@pytest.mark.parametrize(
    "replace",
    [
        "os.execv(sys.executable, [sys.executable, *sys.argv])",
        "os.execvpe('python3', ['python3', *sys.argv], os.environ)",
        "__import__('posix').execve(sys.executable, [sys.executable, *sys.argv], os.environ)",
    ],
)
def test_a_program_that_replaces_itself_does_not_escape_unseen(
    replace: str, record: RunProgram, replay: RunProgram, tmp_path: Path
) -> None:
    """Here it wants another variable. What a forked child becomes, or what is not there, is no matter."""
    source = f"""
if os.fork() == 0: os.execv("/bin/true", ["true"])
os.wait()
try: os.execv("/nowhere", ["nowhere"])
except FileNotFoundError: pass
dist.all_reduce(torch.ones(2))
if "AGAIN" not in os.environ:
    os.environ["AGAIN"] = "1"
    os.environ["PATH"] = os.path.dirname(sys.executable) + os.pathsep + os.environ["PATH"]
    try:
        {replace}
    except Exception: print("swallowed", flush=True)
"""
    recorded = record(source)
    assert recorded.returncode == 0, recorded.stderr
    assert "the program replaced itself by os.exec" in recorded.stderr
    [problem] = open_trace(tmp_path / "trace").missing
    assert "rank 0 ended early: the program replaced itself by os.exec" in problem.text
    assert "last entry 0" in problem.text
    replayed = replay()
    assert (replayed.returncode, replayed.stdout) == (6, "swallowed\n"), replayed.stderr
    assert "replaces itself by os.exec" in replayed.stderr
    assert (
        f"program.py:{(TRAIN + source).splitlines().index('        ' + replace) + 1} <module>"
        in replayed.stderr
    )


@pytest.mark.parametrize(
    ("source", "options", "why"),
    [
        ("dist.all_reduce(torch.ones(2))", (), "the program made no training step"),
        (
            "dist.all_reduce = lambda gradient: dist.broadcast(torch.ones(1, dtype=torch.int64), 0)\ntrain()",
            (),
            "no call inside a training step moves floating-point numbers",
        ),
        ("train()", ("--steps", "5:"), "the recorded window, --steps 5:, has no training call"),
        ("train()", (), ""),
    ],
)
def test_a_good_verdict_says_where_it_compared_nothing(
    source: str, options: tuple[str, ...], why: str, record: RunProgram, replay: RunProgram, tmp_path: Path
) -> None:
    assert record(source, *options).returncode == 0
    replayed = replay("--verdict", "verdict.json")
    assert replayed.returncode == 0, replayed.stderr
    assert (f"no input was compared: {why}" in replayed.stderr) is bool(why), replayed.stderr
    values = json.loads((tmp_path / "verdict.json").read_text())["values"]
    assert (values["compared"], values["why_none"].startswith(why)) == (0 if why else CALLS, True)
    assert bool(values["why_none"]) is bool(why)
    assert "no input was compared: --task structure compares none" in replay("--task", "structure").stderr


FAILS = """
import os, sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
for _ in range(40):
    dist.all_reduce(torch.ones(2))
if dist.get_rank() == 1:
    {end}
dist.all_reduce(torch.ones(2))  # the others wait here when they are ended
"""


@pytest.mark.parametrize("end", ["raise RuntimeError('mine')", "os._exit(3)", "sys.exit(3)"])
def test_a_failing_rank_costs_the_others_no_records(end: str, run_cli: RunCli, tmp_path: Path) -> None:
    """All of it takes less than the time between two flushes."""
    (tmp_path / "program.py").write_text(FAILS.format(end=end))
    recorded = run_cli("record", "--nproc", "4", "--out", "trace", "--", "program.py")
    assert recorded.returncode == (1 if "raise" in end else 3)
    assert "rank 1 failed first" in recorded.stderr
    trace = open_trace(tmp_path / "trace")
    assert [trace.rank(rank).calls.num_rows for rank in range(4)] == [41, 40, 41, 41]


def test_a_rank_alone_and_an_interrupted_one_do_not_stay(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stayed: list[int] = []
    monkeypatch.setattr(RecordSession, "linger", lambda session: stayed.append(session.rank))
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    for name, error in (("interrupt", KeyboardInterrupt()), ("exit", SystemExit(0)), ("error", ValueError())):
        with contextlib.suppress(BaseException), ranklens.record(tmp_path / name):
            raise error
    assert stayed == [0]
    monkeypatch.undo()
    clock = ManualClock(1)
    for world_size, until_ns in ((1, 1), (2, 1 + LINGER_NS)):
        run = msgspec.structs.replace(RUN, world_size=world_size)
        place = RankEnvironment(0, world_size, 0)
        session = RecordSession(tmp_path / str(world_size), run, place, keep_values=False, clock=clock)
        session.close(1)
        session.linger()
        assert clock.now_ns() == until_ns


AFTER = """
import atexit, threading, time
from concurrent.futures import ThreadPoolExecutor
total = torch.ones(2)
started = threading.Event()
def more(name):
    started.wait()
    for _ in range(3):
        dist.all_reduce(total)
    print(name, total.tolist(), flush=True)
pool = ThreadPoolExecutor(1)  # its idle thread is no thread to wait for
pool.submit(int).result()
threading.Thread(target=more, args=("thread",)).start()
atexit.register(more, "second")
atexit.register(more, name="first")
atexit.register(lambda: 1 / 0)
atexit.register(train)
atexit.unregister(train)
started.set()
{end}
"""


@pytest.mark.parametrize(("end", "status"), [("pass", 0), ("sys.exit(3)", 3)])
def test_what_a_program_does_after_its_last_line_is_recorded_and_replayed(
    end: str, status: int, record: RunProgram, replay: RunProgram, tmp_path: Path
) -> None:
    (tmp_path / "program.py").write_text(TRAIN + AFTER.format(end=end))
    source = AFTER.format(end=end)
    recorded = record(source)
    assert recorded.returncode == status, recorded.stderr
    assert [line.split()[0] for line in recorded.stdout.splitlines()] == ["thread", "first", "second"]
    assert "Exception ignored in atexit callback" in recorded.stderr
    assert open_trace(tmp_path / "trace").rank(0).calls.num_rows == 9
    replayed = replay()
    assert (replayed.returncode, replayed.stdout) == (status, recorded.stdout), replayed.stderr
    assert "9 of 9 calls match" in replayed.stderr


OWN_STREAM = """
class Upper:
    def write(self, text): return sys.__stdout__.write(text.upper())
    def flush(self): sys.__stdout__.flush()
sys.stdout = Upper()
train()
"""


def test_a_stream_of_the_programs_own_needs_only_write_and_flush(
    record: RunProgram, replay: RunProgram
) -> None:
    for result in (record(OWN_STREAM), replay()):
        assert (result.returncode, "Traceback" in result.stderr) == (0, False), result.stderr
        assert result.stdout.count("LOSS") == 3


def test_exit_handlers_of_a_program_that_fails_run_when_python_ends(tmp_path: Path) -> None:
    source = (
        "import atexit\n"
        "from ranklens_core.program_end import ProgramEnd\n"
        "try:\n"
        "    with ProgramEnd():\n"
        "        atexit.register(print, 'handler')\n"
        "        raise ValueError\n"
        "except ValueError:\n"
        "    print('failed', flush=True)\n"
    )
    result = run_command([sys.executable, "-c", source], timeout=60, cwd=tmp_path, env=None)
    assert result == (0, "failed\nhandler\n", "")
