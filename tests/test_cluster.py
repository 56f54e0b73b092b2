"""Local ranks: real forks, synchronised by pipes. What a rank does to the others; what is left: nothing."""

from __future__ import annotations

import atexit
import faulthandler
import json
import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import pytest
from conftest import CliResult

from ranklens_core import rank_failure
from ranklens_core.cluster import ClusterResult, run_local
from ranklens_core.errors import RankLensError, UsageError
from ranklens_core.program import Program
from ranklens_core.rank_failure import FailureReport, FirstFailure, RankFailure, is_peer_loss


class Output:
    """Collects what ``on_output`` is given, in order."""

    def __init__(self) -> None:
        self.chunks: list[tuple[int, str, bytes]] = []

    def __call__(self, rank: int, name: str, lines: bytes) -> None:
        self.chunks.append((rank, name, lines))

    def of(self, name: str, rank: int | None = None) -> bytes:
        return b"".join(data for r, n, data in self.chunks if n == name and rank in (None, r))


@pytest.fixture
def output() -> Output:
    return Output()


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for fd in ends:
        os.close(fd)


def block(fd: int) -> NoReturn:
    """Wait for what never comes: a peer that has crashed."""
    os.read(fd, 1)
    raise AssertionError("nobody writes into this pipe")


def abort_quietly() -> NoReturn:
    faulthandler.disable()
    os.abort()


def summary(result: ClusterResult) -> tuple[tuple[int, ...], str | None, int]:
    failure = result.first_failure
    return result.statuses, failure.describe() if failure else None, result.status


def test_each_rank_has_torchruns_environment(output: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")

    def target(rank: int) -> int:
        assert sys.stdin.read() == ""
        print(json.dumps(dict(os.environ)))
        return 0

    result = run_local(3, target, env={"STEPS": "7", "RANK": "9"}, on_output=output)
    assert summary(result) == ((0, 0, 0), None, 0)
    assert result.wall_ns > 0
    ports = set()
    for rank in range(3):
        env = json.loads(output.of("stdout", rank))
        ports.add(env["MASTER_PORT"])
        expected = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "3",
            "LOCAL_WORLD_SIZE": "3",
            "GROUP_RANK": "0",
            "NODE_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
            "STEPS": "7",
            "OMP_NUM_THREADS": "3",
        }
        assert expected.items() <= env.items()
        assert "TORCHELASTIC_USE_AGENT_STORE" not in env
    (port,) = ports
    assert 1024 <= int(port) < 65536


def test_defaults_of_the_environment(output: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS")

    def target(rank: int) -> int:
        print(os.environ["OMP_NUM_THREADS"], os.environ["MASTER_PORT"])
        return 0

    run_local(1, target, master_port=12345, on_output=output)
    assert output.of("stdout") == b"1 12345\n"
    assert "OMP_NUM_THREADS" not in os.environ


def test_an_exception_ends_all_and_its_traceback_comes_first(pipe: tuple[int, int], output: Output) -> None:
    """The failing rank writes last: its traceback waits until another rank, told to end, has said so."""

    def say_and_exit(*_: object) -> NoReturn:
        os.write(2, b"told to end\n")
        os.write(pipe[1], b"!")
        os._exit(0)

    def show_late(*hook_args: object) -> None:
        os.read(pipe[0], 1)
        sys.__excepthook__(*hook_args)  # type: ignore[arg-type]

    def target(rank: int) -> int:
        if rank == 2:
            sys.excepthook = show_late
            raise ValueError("bad batch")
        signal.signal(signal.SIGTERM, say_and_exit if rank == 0 else signal.SIG_DFL)
        while True:
            signal.pause()

    result = run_local(4, target, on_output=output, grace_s=60)
    assert result.first_failure == RankFailure(2, 1)
    assert summary(result)[1:] == ("rank 2 failed first: exit status 1", 1)
    assert output.of("stderr").startswith(b"Traceback (most recent call last):\n")
    assert output.of("stderr").endswith(b"\nValueError: bad batch\ntold to end\n")


def test_a_consequence_is_shown_after_its_cause(
    pipe: tuple[int, int], output: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_failure, "_SETTLE_NS", 10**12)

    def target(rank: int) -> int:
        if rank == 0:
            atexit.register(os.write, pipe[1], b"!")  # after the traceback
            raise ConnectionResetError("lost rank 1")
        if rank == 1:
            os.read(pipe[0], 1)
            raise ValueError("the cause")
        while True:
            signal.pause()

    result = run_local(3, target, on_output=output)
    assert result.first_failure == RankFailure(1, 1)
    assert [line for line in output.of("stderr").splitlines() if not line.startswith((b" ", b"Trace"))] == [
        b"ValueError: the cause",
        b"ConnectionResetError: lost rank 1",
    ]


@pytest.mark.parametrize(
    ("end", "failure", "text"),
    [
        (lambda: os._exit(7), RankFailure(1, 7), "exit status 7"),
        (lambda: sys.exit(5), RankFailure(1, 5), "exit status 5"),
        (lambda: sys.exit("why"), RankFailure(1, 1), "exit status 1"),
        (lambda: sys.exit(-1), RankFailure(1, 255), "exit status 255"),
        (lambda: os.kill(os.getpid(), 9), RankFailure(1, 137, 9), "killed by signal 9 (SIGKILL)"),
        (lambda: os.kill(os.getpid(), 15), RankFailure(1, 143, 15), "killed by signal 15 (SIGTERM)"),
        (lambda: signal.raise_signal(signal.SIGINT), RankFailure(1, 130, 2), "killed by signal 2 (SIGINT)"),
        (abort_quietly, RankFailure(1, 134, 6), "killed by signal 6 (SIGABRT)"),
    ],
    ids=["_exit", "exit", "exit-text", "exit--1", "kill-9", "sigterm", "sigint", "abort"],
)
def test_the_first_failing_ranks_own_status_is_the_jobs(
    pipe: tuple[int, int], output: Output, end: Callable[[], None], failure: RankFailure, text: str
) -> None:
    def target(rank: int) -> int:
        if rank == 1:
            end()
        block(pipe[0])

    result = run_local(3, target, on_output=output, grace_s=60)
    assert result.first_failure == failure
    assert summary(result) == ((143, failure.status, 143), f"rank 1 failed first: {text}", failure.status)
    assert result.interrupted_by is None
    assert (b"why\n" in output.of("stderr")) == (text == "exit status 1")


def test_the_status_a_target_returns(output: Output) -> None:
    assert summary(run_local(2, lambda rank: 0, on_output=output)) == ((0, 0), None, 0)
    assert run_local(1, lambda rank: 4, on_output=output).first_failure == RankFailure(0, 4)
    assert output.chunks == []


def test_a_killed_rank_is_blamed_not_those_who_lost_it(
    output: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_failure, "_SETTLE_NS", 10**12)
    connection_read, connection_write = os.pipe()
    go_read, go_write = os.pipe()

    def target(rank: int) -> int:
        if rank == 1:
            os.write(1, b"ready\n")
            os.read(go_read, 1)
            os.kill(os.getpid(), signal.SIGKILL)
        os.close(connection_write)
        os.write(1, b"ready\n")
        if os.read(connection_read, 1) == b"":
            raise RuntimeError("[gloo/pair.cc:553] Connection closed by peer [127.0.0.1]:1234")
        return 0

    def on_output(rank: int, name: str, lines: bytes) -> None:
        output(rank, name, lines)
        if name == "stdout" and output.of("stdout").count(b"ready") == 4:
            os.close(connection_write)  # now only rank 1 holds it
            os.write(go_write, b"!")

    result = run_local(4, target, on_output=on_output)
    assert result.first_failure == RankFailure(1, 137, signal.SIGKILL)
    assert result.status == 137
    for fd in (connection_read, go_read, go_write):
        os.close(fd)


def test_consequences_alone_are_blamed_in_order_of_time() -> None:
    failures = FirstFailure()
    assert failures.decide(0, others_may_fail=True) is None
    failures.add_report(FailureReport(rank=4, time_ns=20, status=1, peer_lost=True), now_ns=50)
    failures.add_report(FailureReport(rank=7, time_ns=10, status=1, peer_lost=True), now_ns=60)
    assert failures.decide_at_ns is not None
    assert failures.decide(failures.decide_at_ns - 1, others_may_fail=True) is None
    assert failures.decide(failures.decide_at_ns, others_may_fail=True) == RankFailure(7, 1)
    assert failures.decide(61, others_may_fail=False) == RankFailure(7, 1)


def test_a_cause_is_blamed_at_once_though_its_consequence_came_first() -> None:
    failures = FirstFailure()
    failures.add_report(FailureReport(rank=4, time_ns=20, status=1, peer_lost=True), now_ns=50)
    failures.add_end(5, 134, signal.SIGABRT, now_ns=55)
    assert failures.decide(60, others_may_fail=True) is None
    failures.add_end(3, 137, signal.SIGKILL, now_ns=70)
    assert failures.decide(70, others_may_fail=True) == RankFailure(3, 137, signal.SIGKILL)


def test_a_report_survives_the_pipe() -> None:
    report = FailureReport(rank=63, time_ns=2**62, status=255, peer_lost=True)
    assert len(report.to_bytes()) == FailureReport.SIZE
    assert FailureReport.from_bytes(report.to_bytes()) == report


def wrapped(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ConnectionResetError("x"), True),
        (BrokenPipeError(), True),
        (RuntimeError("[gloo] Connection closed by peer [::1]:99"), True),
        (RuntimeError("Timed out waiting 1800000ms for recv operation to complete"), True),
        (type("DistNetworkError", (RuntimeError,), {})("failed to recv, got 0 bytes"), True),
        (wrapped(ValueError("step failed"), ConnectionError()), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("connection reset by peer"), False),
        (FileNotFoundError("data.bin"), False),
    ],
)
def test_what_the_loss_of_a_peer_looks_like(error: Exception, expected: bool) -> None:
    assert is_peer_loss(error) is expected


def test_a_rank_that_will_not_end_is_killed_after_the_grace(pipe: tuple[int, int], output: Output) -> None:
    def target(rank: int) -> int:
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        if rank == 0:
            os.read(pipe[0], 1)
            raise ValueError
        os.write(pipe[1], b"!")
        while True:
            signal.pause()

    result = run_local(2, target, grace_s=0.1, on_output=output)
    assert result.statuses == (1, 137)
    assert result.first_failure == RankFailure(0, 1)


def test_bytes_pass_unchanged_and_lines_whole(output: Output) -> None:
    """Ranks take turns at writing halves of lines that are not UTF-8; each comes out in one piece."""
    turns = [os.pipe() for _ in range(3)]

    def target(rank: int) -> int:
        for half in (b"rank %d \xff\xfe step" % rank, b" 1 \x80 loss\r\nno newline at the end"):
            os.read(turns[rank][0], 1)
            os.write(1, half)
            os.write(turns[(rank + 1) % 3][1], b"!")
        return 0

    os.write(turns[0][1], b"!")
    run_local(3, target, on_output=output)
    for rank in range(3):
        expected = b"rank %d \xff\xfe step 1 \x80 loss\r\nno newline at the end\n" % rank
        assert output.of("stdout", rank) == expected
    assert all(data.endswith(b"\n") for _, _, data in output.chunks)
    for ends in turns:
        for fd in ends:
            os.close(fd)


def test_a_progress_bar_is_passed_on_as_it_moves(pipe: tuple[int, int]) -> None:
    seen: list[bytes] = []

    def target(rank: int) -> int:
        os.write(1, b" 10%\r 20%\r 30%")
        os.read(pipe[0], 1)
        os.write(1, b"\n")
        return 0

    def on_output(rank: int, name: str, lines: bytes) -> None:
        if not seen:
            os.write(pipe[1], b"!")
        seen.append(lines)

    run_local(1, target, on_output=on_output)
    assert seen == [b" 10%\r 20%\r", b" 30%\n"]


def test_a_line_without_end_does_not_fill_the_memory(output: Output) -> None:
    def target(rank: int) -> int:
        for _ in range(48):
            os.write(1, b"x" * 65536)
        return 0

    run_local(1, target, on_output=output)
    assert output.of("stdout") == b"x" * 48 * 65536 + b"\n"
    assert max(len(data) for _, _, data in output.chunks) < 3 << 20


def test_much_output_of_64_ranks_blocks_nobody(output: Output) -> None:
    def target(rank: int) -> int:
        for line in range(500):
            print(f"rank {rank:02} step {line:03} " + "x" * 200)
            print(f"rank {rank:02} step {line:03} " + "y" * 200, file=sys.stderr)
        return 0

    result = run_local(64, target, on_output=output)
    assert result.statuses == (0,) * 64
    for name, letter in (("stdout", "x"), ("stderr", "y")):
        lines = output.of(name).decode().splitlines()
        assert sorted(lines) == [
            f"rank {r:02} step {s:03} " + letter * 200 for r in range(64) for s in range(500)
        ]


def test_how_a_rank_ends(output: Output) -> None:
    """Threads are joined, then its own atexit handlers run, not the launcher's; buffers are flushed."""

    def launchers() -> None:
        os.write(1, b"the launcher's handler\n")

    def target(rank: int) -> int:
        gate = threading.Event()
        atexit.register(lambda: print("atexit", end=""))
        threading.Thread(target=lambda: gate.wait() and print("thread")).start()
        threading.Timer(0, gate.set).start()
        return 0

    atexit.register(launchers)
    try:
        run_local(1, target, on_output=output)
    finally:
        atexit.unregister(launchers)
    assert output.of("stdout") == b"thread\natexit\n"


def test_a_ranks_own_processes_end_with_the_job(output: Output) -> None:
    def target(rank: int) -> int:
        child = subprocess.Popen(["sleep", "1000"])
        print(child.pid)
        return 0

    began_ns = time.monotonic_ns()
    assert run_local(2, target, on_output=output).status == 0
    assert time.monotonic_ns() - began_ns < 100e9
    for line in output.of("stdout").split():
        assert has_ended(int(line))


def test_an_error_in_the_launcher_leaves_no_rank(pipe: tuple[int, int]) -> None:
    pids: list[int] = []

    def target(rank: int) -> int:
        print(os.getpid())
        block(pipe[0])

    def on_output(rank: int, name: str, lines: bytes) -> None:
        pids.append(int(lines))
        if len(pids) == 3:
            raise BrokenPipeError("head has seen enough")

    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    fds = os.listdir("/proc/self/fd")
    with pytest.raises(BrokenPipeError, match="seen enough"):
        run_local(3, target, on_output=on_output)
    assert all(has_ended(pid) for pid in pids)
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == handlers
    assert os.listdir("/proc/self/fd") == fds


def test_a_refused_fork_is_explained(
    monkeypatch: pytest.MonkeyPatch, output: Output, pipe: tuple[int, int]
) -> None:
    real_fork, forks = os.fork, []

    def fork() -> int:
        if len(forks) == 2:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        forks.append(real_fork())
        return forks[-1]

    monkeypatch.setattr(os, "fork", fork)
    with pytest.raises(RankLensError, match="could not start rank 2 of 5: Resource temporarily unavailable"):
        run_local(5, lambda rank: block(pipe[0]), on_output=output)
    assert all(has_ended(pid) for pid in forks)


@pytest.mark.parametrize(
    ("nproc", "target", "options", "message"),
    [
        (0, lambda rank: 0, {}, "at least one rank"),
        (1, lambda rank: 0, {"start_method": "forkserver"}, "choose fork"),
        (1, lambda rank: 0, {"start_method": "spawn"}, "spawn runs the arguments of a fresh python"),
        (1, ["-c", "pass"], {}, "fork runs a function"),
    ],
)
def test_wrong_use(nproc: int, target: object, options: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        run_local(nproc, target, **options)  # type: ignore[arg-type]


def test_spawn_runs_fresh_interpreters(output: Output) -> None:
    code = (
        "import os, sys; print(os.environ['RANK'], 'ranklens_core' in sys.modules); sys.exit(4 * (sys.argv[1]"
    )
    result = run_local(
        2, ["-c", code + " == os.environ['RANK']))", "1"], start_method="spawn", on_output=output
    )
    assert output.of("stdout", 1) == b"1 False\n"
    assert result.first_failure == RankFailure(1, 4)


def test_preimports_are_shared_and_a_failing_one_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, output: Output, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "rl_framework.py").write_text("import os\nwhere = os.getpid(), os.environ['FLAG']\n")

    def target(rank: int) -> int:
        print(*sys.modules["rl_framework"].where)
        return 0

    try:
        run_local(2, target, preimport=["rl_missing", "rl_framework"], env={"FLAG": "on"}, on_output=output)
    finally:
        sys.modules.pop("rl_framework", None)
    assert output.of("stdout") == f"{os.getpid()} on\n".encode() * 2
    assert "could not import rl_missing before starting the ranks" in caplog.text
    assert "FLAG" not in os.environ


def test_ranks_differ_from_their_launcher_as_fresh_processes_do(
    run_python: Callable[..., CliResult],
) -> None:
    """Threads as OMP_NUM_THREADS says, though torch was loaded before; random numbers of their own."""
    result = run_python("""
import os
os.environ["OMP_NUM_THREADS"] = "2"
import gc, random, numpy.random, torch
from ranklens_core.cluster import run_local
def target(rank):
    print(torch.get_num_threads(), gc.isenabled(), random.random(), numpy.random.random())
    return 0
run_local(2, target, env={"OMP_NUM_THREADS": "1"})
print(torch.get_num_threads(), gc.isenabled(), gc.get_freeze_count())
""")
    one, two, launcher = (line.split() for line in result.stdout.splitlines())
    assert one[:2] == two[:2] == ["1", "True"]
    assert one[2] != two[2]
    assert one[3] != two[3]
    assert launcher == ["2", "True", "0"]


@pytest.mark.parametrize("name", ["stdout", "stderr"])
def test_without_a_handler_bytes_go_to_our_own_streams(
    capfdbinary: pytest.CaptureFixture[bytes], name: str
) -> None:
    fd = {"stdout": 1, "stderr": 2}[name]
    run_local(1, lambda rank: 0 * os.write(fd, b"\xff\n"))
    assert getattr(capfdbinary.readouterr(), name[3:]) == b"\xff\n"


def test_a_programs_failure_in_a_rank_looks_as_under_python(tmp_path: Path, output: Output) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import pickle\nclass C: pass\nprint(type(pickle.loads(pickle.dumps(C()))))\n"
        "def step():\n    1 / 0\nstep()\n"
    )
    program = Program.parse([str(script)])

    def target(rank: int) -> int:
        program.run()
        return 0

    result = run_local(2, target, on_output=output)
    real = subprocess.run([sys.executable, script], capture_output=True, check=False)
    assert result.first_failure is not None
    rank = result.first_failure.rank
    assert output.of("stderr", rank) == real.stderr
    assert output.of("stdout", rank) == real.stdout == b"<class '__main__.C'>\n"


LAUNCHER = """
import os, signal, sys
from ranklens_core.cluster import run_local
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job starts with it ignored

def target(rank):
    if "stubborn" in sys.argv:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    print(os.getpid())
    while True:
        signal.pause()

result = run_local(3, target, grace_s=float(sys.argv[1]))
print(result.statuses, result.first_failure, result.interrupted_by, result.status)
"""


@pytest.fixture
def launcher() -> Iterator[Callable[..., tuple[subprocess.Popen[str], list[int]]]]:
    """Start three ranks that wait; returns the launching process and the ranks' pids."""
    with_pipes = []

    def start(*args: str) -> tuple[subprocess.Popen[str], list[int]]:
        process = subprocess.Popen(
            [sys.executable, "-c", LAUNCHER, *args], text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        with_pipes.append(process)
        assert process.stdout is not None
        return process, [int(process.stdout.readline()) for _ in range(3)]

    yield start
    for process in with_pipes:
        process.kill()
        process.communicate()


def has_ended(pid: int) -> bool:
    """Whether the process ends within 20 s; a zombie has ended."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([fd], [], [], 20)[0])
    finally:
        os.close(fd)


def test_ctrl_c_interrupts_every_rank(
    launcher: Callable[..., tuple[subprocess.Popen[str], list[int]]],
) -> None:
    process, pids = launcher("60")
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=60)
    assert stdout == "(130, 130, 130) None 2 130\n"
    said = sorted(re.findall(r"^rank (\d) interrupted in .*:\d+ \(target\)$", stderr, re.MULTILINE))
    assert said == ["0", "1", "2"]
    assert "Traceback" not in stderr
    assert all(has_ended(pid) for pid in pids)


def test_a_second_ctrl_c_kills(launcher: Callable[..., tuple[subprocess.Popen[str], list[int]]]) -> None:
    process, pids = launcher("1000", "stubborn")
    while process.poll() is None:  # a signal that comes while the first is pending merges with it
        process.send_signal(signal.SIGINT)
        select.select([], [], [], 0.01)
    assert process.communicate()[0] == "(137, 137, 137) None 2 130\n"
    assert all(has_ended(pid) for pid in pids)


def test_the_grace_after_ctrl_c_is_limited(
    launcher: Callable[..., tuple[subprocess.Popen[str], list[int]]],
) -> None:
    process, pids = launcher("0.1", "stubborn")
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=60)[0] == "(137, 137, 137) None 2 130\n"
    assert all(has_ended(pid) for pid in pids)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_the_launcher_ends_the_ranks(
    launcher: Callable[..., tuple[subprocess.Popen[str], list[int]]], signum: signal.Signals
) -> None:
    process, pids = launcher("60")
    process.send_signal(signum)
    stdout, _ = process.communicate(timeout=60)
    assert stdout == f"(143, 143, 143) None {signum.value} {128 + signum}\n"
    assert all(has_ended(pid) for pid in pids)


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")
def test_a_killed_launcher_leaves_no_orphan(
    launcher: Callable[..., tuple[subprocess.Popen[str], list[int]]],
) -> None:
    process, pids = launcher("60", "stubborn")
    process.kill()
    assert process.wait() == -signal.SIGKILL
    assert all(has_ended(pid) for pid in pids)
