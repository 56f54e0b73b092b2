"""Each bad input has its own message and exit status; nothing is guessed."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from ranklens_core.trace import open_trace, write_run

TINY = Path(__file__).parent / "programs" / "tiny.py"
RANKLENS = (sys.executable, "-m", "ranklens_core")
CALLS = 25  # 4 steps x (2 layers + 4 gradients), and the barrier


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four ranks of tiny.py, values of all but rank 3."""
    out = tmp_path_factory.mktemp("recorded") / "trace"
    result = ranklens("record", "--nproc", "4", "--payload", "0,1,2", "--out", str(out), "--", str(TINY))
    assert result.returncode == 0, result.stderr
    return out


@pytest.fixture
def copy(trace: Path, tmp_path: Path) -> Path:
    """A copy of the trace that a test may damage."""
    return Path(shutil.copytree(trace, tmp_path / "copy"))


def ranklens(
    *args: str, env: dict[str, str] | None = None, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*RANKLENS, *args],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=cwd,
        env={**os.environ, **(env or {})},
    )


def replay(trace: Path, rank: int = 2, *more: str, env: dict[str, str] | None = None) -> tuple[int, str]:
    result = ranklens("replay", str(trace), "--rank", str(rank), *more, "--", str(TINY), env=env)
    assert "Traceback" not in result.stderr, result.stderr
    return result.returncode, result.stderr


def test_the_good_case_is_good(trace: Path, tmp_path: Path) -> None:
    verdict = tmp_path / "verdict.json"
    status, text = replay(trace, 2, "--verdict", str(verdict))
    assert status == 0
    assert f"{CALLS} of {CALLS} calls match" in text
    written = json.loads(verdict.read_text())
    assert written["status"] == "ok"
    assert written["calls"] == {"recorded": CALLS, "replayed": CALLS}
    assert written["structure"]["training_matched"] == written["structure"]["training_total"] == CALLS - 1
    assert written["values"] == {
        "identical": CALLS - 1,
        "compared": CALLS - 1,
        "first_divergence": None,
        "why_none": "",
    }
    assert written["provenance"]["result"] == {"recorded": CALLS, "synthesised": 0}
    assert written["printed"]["compared"] == 8


def test_no_such_trace(tmp_path: Path) -> None:
    status, text = replay(tmp_path / "nowhere")
    assert (status, "there is no trace at" in text) == (5, True)


def test_a_directory_that_is_no_trace(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("nothing to do with it")
    status, text = replay(tmp_path)
    assert (status, "is no trace" in text) == (5, True)


@pytest.mark.parametrize("rank", [-1, 4])
def test_a_rank_outside_the_world(trace: Path, rank: int) -> None:
    status, text = replay(trace, rank)
    assert (status, f"rank {rank} is not in" in text, "0 to 3" in text) == (2, True, True)


def test_a_rank_without_values(trace: Path) -> None:
    status, text = replay(trace, 3)
    assert (status, "recorded without values" in text, "Ranks with values: 0, 1, 2" in text) == (
        5,
        True,
        True,
    )


def test_a_rank_without_values_can_still_be_checked_for_structure(trace: Path) -> None:
    status, text = replay(trace, 3, "--task", "structure")
    assert (status, f"{CALLS} synthesised" in text) == (0, True)


def test_a_newer_format(copy: Path) -> None:
    run = open_trace(copy).run
    write_run(copy, msgspec.structs.replace(run, format=99, oldest_reader=99))
    status, text = replay(copy)
    assert (status, "99" in text, "Upgrade RankLens" in text) == (5, True, True)


@pytest.mark.parametrize(
    "name", ["payload-000.bin", "calls.arrows", "completions.arrows", "signatures.arrows"]
)
def test_a_flipped_bit(copy: Path, name: str) -> None:
    file = copy / "rank-00002" / name
    data = bytearray(file.read_bytes())
    at = 1 if name.startswith("payload") else len(data) // 2  # between values there is padding
    data[at] ^= 4
    file.write_bytes(data)
    status, text = replay(copy)
    assert (status, name in text) == (5, True)
    assert ranklens("verify", str(copy)).returncode == 5


@pytest.mark.parametrize("name", ["payload-000.bin", "calls.arrows", "values.arrows"])
def test_a_truncated_file(copy: Path, name: str) -> None:
    file = copy / "rank-00002" / name
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    status, text = replay(copy)
    assert (status, name in text) == (5, True)


def test_another_program(trace: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.py"
    other.write_text(
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "dist.all_gather_object([None] * 4, 'hello')\n"
    )
    result = ranklens("replay", str(trace), "--rank", "2", "--", str(other))
    assert result.returncode == 3
    assert "is not the file that was recorded" in result.stderr
    assert f"{other}:3" in result.stderr


@pytest.mark.parametrize(
    ("env", "differs"),
    [
        ({"DTYPE": "bfloat16"}, "in_dtypes: recorded [float32], now [bfloat16]"),
        ({"MICRO": "2"}, "in_shapes: recorded [[4, 8]], now [[2, 8]]"),
        ({"WIDTH": "16"}, "in_shapes: recorded [[4, 8]], now [[4, 16]]"),
        ({"LAYERS": "3"}, "nearest"),
        ({"TP": "2"}, "no group of ranks 2,3"),
    ],
)
def test_a_changed_program_setting(trace: Path, env: dict[str, str], differs: str) -> None:
    status, text = replay(trace, env=env)
    assert status == 3
    assert differs in text
    assert "tiny.py:" in text
    (name, value), *_ = env.items()
    assert f"{name} was unset when recorded, is {value} here" in text


def test_fewer_calls_than_recorded(trace: Path) -> None:
    status, text = replay(trace, env={"STEPS": "3"})
    assert (status, "structure mismatch" in text) == (3, True)


def test_a_program_that_raises(trace: Path) -> None:
    result = ranklens("replay", str(trace), "--rank", "2", "--", str(TINY), env={"FAIL": "raise"})
    assert result.returncode == 1
    assert "RuntimeError: the program's own error" in result.stderr
    assert "program-failed" in result.stderr


def test_a_program_that_exits_passes_its_status_through(trace: Path) -> None:
    status, text = replay(trace, env={"FAIL": "exit"})
    assert (status, "program-failed" in text) == (7, True)


def test_a_world_that_is_another(trace: Path) -> None:
    status, text = replay(trace, env={"RANK": "0", "WORLD_SIZE": "8"})
    assert (status, "WORLD_SIZE=8, but the replay is of rank 2 of 4" in text) == (2, True)


def test_record_needs_an_empty_directory(trace: Path) -> None:
    result = ranklens("record", "--nproc", "2", "--out", str(trace), "--", str(TINY))
    assert (result.returncode, "--overwrite" in result.stderr) == (2, True)


def test_record_to_where_nothing_can_be_written() -> None:
    result = ranklens("record", "--nproc", "2", "--out", "/proc/trace", "--", str(TINY))
    assert (result.returncode, "cannot be used for a trace" in result.stderr) == (2, True)


def test_record_in_no_rank_at_all(tmp_path: Path) -> None:
    env = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    assert env == dict(os.environ)
    result = ranklens("record", "--payload", "all", "--out", str(tmp_path / "t"), "--", str(TINY))
    assert (result.returncode, "This process is no rank of a job" in result.stderr) == (2, True)


@pytest.mark.parametrize("window", ["3", "3:1", "a:b", "-1:2"])
def test_a_window_that_is_none(window: str, tmp_path: Path) -> None:
    result = ranklens(
        "record", "--nproc", "2", "--steps", window, "--out", str(tmp_path / "t"), "--", str(TINY)
    )
    assert (result.returncode, "--steps takes A:B" in result.stderr) == (2, True)


def test_a_window_replays_from_the_start_to_its_end(tmp_path: Path) -> None:
    out = tmp_path / "window"
    recorded = ranklens("record", "--nproc", "2", "--steps", "1:3", "--out", str(out), "--", str(TINY))
    assert recorded.returncode == 0, recorded.stderr
    verdict = tmp_path / "verdict.json"
    status, _ = replay(out, 1, "--verdict", str(verdict))
    written = json.loads(verdict.read_text())
    assert status == 0
    assert written["calls"] == {"recorded": 18, "replayed": 18}
    assert written["values"]["compared"] == written["values"]["identical"] == 12
    assert "compared from step 1 to step 3; steps before 1 kept" in ranklens("info", str(out)).stdout


def test_a_rank_killed_in_mid_run(tmp_path: Path) -> None:
    out = tmp_path / "killed"
    recorded = ranklens("record", "--nproc", "4", "--out", str(out), "--", str(TINY), env={"FAIL": "kill"})
    assert recorded.returncode == 128 + signal.SIGKILL
    assert "rank 1 failed first" in recorded.stderr
    checked = ranklens("verify", str(out))
    assert checked.returncode == 5
    assert "rank 1 ended early" in checked.stdout
    for rank in range(4):
        status, text = replay(out, rank, env={"FAIL": "no"})
        assert status == 5
        matched = re.search(r"structure +(\d+) of \1 calls match", text)
        # all calls of two whole steps; those of the third that needed no peer may be there too
        assert matched is not None
        assert 12 <= int(matched[1]) <= 15
        assert text.count("The recording ends here") == 1


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Callable[[str], tuple[subprocess.Popen[str], Path]]]:
    """Starts a recording of a program text and gives the process and its trace."""
    started: list[subprocess.Popen[str]] = []

    def start(source: str) -> tuple[subprocess.Popen[str], Path]:
        program, out = tmp_path / "program.py", tmp_path / "trace"
        program.write_text(source)
        process = subprocess.Popen(
            [*RANKLENS, "record", "--nproc", "2", "--out", str(out), "--", str(program)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process, out

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_ctrl_c_ends_the_job_and_leaves_a_trace(
    running: Callable[[str], tuple[subprocess.Popen[str], Path]],
) -> None:
    process, out = running(
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "dist.all_reduce(torch.ones(1))\n"
        "print('ready', flush=True)\n"
        "dist.barrier() if dist.get_rank() else __import__('signal').pause()\n"
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130
    assert ranklens("info", str(out), "--json").returncode == 0


def test_a_full_disk_ends_the_recording_not_the_job(tmp_path: Path) -> None:
    source = tmp_path / "program.py"
    source.write_text(
        "import resource, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
        "import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "for i in range(20):\n"
        "    dist.all_reduce(torch.full((10_000,), float(i)))\n"
        "print('done', flush=True)\n"
        "dist.destroy_process_group()\n"
    )
    out = tmp_path / "trace"
    result = ranklens("record", "--nproc", "2", "--out", str(out), "--", str(source))
    assert (result.returncode, result.stdout) == (0, "done\ndone\n")
    assert "File too large" in result.stderr
    assert ranklens("verify", str(out)).returncode == 5


def test_a_program_that_communicates_nothing_is_told_of(tmp_path: Path) -> None:
    program = tmp_path / "alone.py"
    program.write_text("print('alone')\n")
    result = ranklens("record", "--nproc", "2", "--out", str(tmp_path / "trace"), "--", str(program))
    assert (result.returncode, "no call was recorded" in result.stderr) == (0, True)
