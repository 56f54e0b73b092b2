"""Fixtures for every test, among them the proof that a test leaves the process as it found it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol

# Before anything imports torch: two test workers on two cores must not fight over them, and
# gradients must not depend on the number of threads.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from process_state import ProcessState

CLI_TIMEOUT_S = 240
"""Below pytest's own limit of 300 s, so that the command's output is shown."""

CASES = Path(__file__).resolve().parents[2] / "shared" / "cases"
"""Programs written without RankLens in mind; they are kept beside the repository, not in it."""


@pytest.fixture(autouse=True)
def process_is_left_as_it_was() -> Iterator[None]:
    """Fail the test that leaves a patch, kernel, process group, variable, thread or child behind.

    See ``process_state.py`` for what is watched and how to add to it.
    """
    before = ProcessState.capture()
    yield
    left_behind = before.changes(ProcessState.capture())
    if left_behind:
        pytest.fail("the test left the process changed:\n  " + "\n  ".join(left_behind), pytrace=False)


class CliResult(NamedTuple):
    """How a command ended: exit status (negative: the signal that killed it) and its output."""

    returncode: int
    stdout: str
    stderr: str


class RunCli(Protocol):
    def __call__(
        self,
        *args: str | Path,
        timeout: float = ...,
        cwd: Path | None = ...,
        env: dict[str, str] | None = ...,
        stdin: str | None = ...,
    ) -> CliResult: ...


@pytest.fixture
def run_cli(tmp_path: Path) -> RunCli:
    """``run_cli("info", trace)``: run ``python -m ranklens_core info TRACE`` in a process of its own.

    Works in ``tmp_path`` unless ``cwd`` is given; ``env`` is added to the environment, ``stdin`` is what
    the command reads. A command that takes more than ``timeout`` seconds is ended, its local ranks too,
    and the test fails.
    """

    def run(
        *args: str | Path,
        timeout: float = CLI_TIMEOUT_S,
        cwd: Path | None = None,
        env: dict[str, str] | None = None,
        stdin: str | None = None,
    ) -> CliResult:
        command = [sys.executable, "-m", "ranklens_core", *map(str, args)]
        return run_command(command, timeout=timeout, cwd=cwd or tmp_path, env=env, stdin=stdin)

    return run


def run_command(
    command: list[str], *, timeout: float, cwd: Path, env: dict[str, str] | None, stdin: str | None = None
) -> CliResult:
    """Run ``command`` in its own session; if it is too slow, end all of that session's processes."""
    with subprocess.Popen(
        command,
        cwd=cwd,
        env=os.environ | (env or {}),
        stdin=subprocess.DEVNULL if stdin is None else subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            stdout, stderr = process.communicate(stdin, timeout=timeout)
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)
            stdout, stderr = process.communicate()
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            pytest.fail(
                f"{' '.join(command)} took more than {timeout} s\n--- stdout\n{stdout}\n--- stderr\n{stderr}",
                pytrace=False,
            )
    return CliResult(process.returncode, stdout, stderr)


@pytest.fixture
def run_python(tmp_path: Path) -> Callable[..., CliResult]:
    """``run_python(source, *args)``: run Python source in a fresh interpreter, in ``tmp_path``."""

    def run(source: str, *args: Any, timeout: float = CLI_TIMEOUT_S) -> CliResult:
        command = [sys.executable, "-c", source, *map(str, args)]
        return run_command(command, timeout=timeout, cwd=tmp_path, env=None)

    return run


@pytest.fixture(scope="session")
def cases_dir() -> Path:
    """The directory with the user programs ``ddp.py``, ``megatron_gpt.py``, ..."""
    if not CASES.is_dir():
        pytest.skip("the user programs (shared/cases beside the repository) are not on this machine")
    return CASES
