"""The inside of a local rank: from ``fork()`` to ``os._exit()``. ``cluster.py`` is the outside.
 A rank runs in its own process group, with stdin from /dev/null, stdout and stderr into the launcher's
pipes, and the environment that torchrun would give it. When the launcher dies, however it dies, the kernel
kills the rank.
 How a rank ends: non-daemon threads are joined, then the ``atexit`` handlers registered since the fork run,
then Python's and C's output buffers are flushed, then ``os._exit``. Python's own finalisation is left out:
it would run the launcher's ``finally`` blocks and handlers (and delete its temporary files) once a rank.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import logging
import os
import signal
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any, NoReturn

from ranklens_core.program import exit_status, flush_output, print_program_error, program_traceback
from ranklens_core.rank_failure import FailureReport, is_peer_loss

RankTarget = Callable[[int], int] | Sequence[str]
"""A function from rank to exit status, or the arguments of a fresh python."""

_JOB_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_LIBC = ctypes.CDLL(None)


@dataclass(frozen=True)
class RankSetup:
    """What a rank needs from the launcher: file descriptors, environment and the signal mask to go back
    to."""

    rank: int
    launcher_pid: int
    stdout_fd: int
    stderr_fd: int
    report_fd: int
    close_fds: Sequence[int]
    env: Mapping[str, str]
    signal_mask: set[int | signal.Signals]


def handled_signals() -> tuple[signal.Signals, ...]:
    """The signals that end a job; those the user had ignored (nohup, a background job) stay ignored."""
    return tuple(s for s in _JOB_SIGNALS if signal.getsignal(s) is not signal.SIG_IGN)


def flush_c_output() -> None:
    """Flush C's stdio: what is in it at a fork would come out of every rank, and ``os._exit`` would lose
    it."""
    _LIBC.fflush(None)


def run_rank(setup: RankSetup, target: RankTarget) -> NoReturn:
    """Be the rank: call ``target(rank)`` (or execute ``python *target``) and leave the process. Never
    returns."""
    status = 1
    try:
        _become_rank(setup)
        if not callable(target):
            os.execve(sys.executable, [sys.executable, *target], os.environ)
        _leave_launcher_state_behind()
        status = _call(target, setup)
        status = _finish(status)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def _become_rank(setup: RankSetup) -> None:
    os.setpgid(0, 0)
    if sys.platform == "linux":
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != setup.launcher_pid:  # it died before prctl took effect
        os._exit(128 + signal.SIGKILL)
    for signum in handled_signals():
        signal.signal(signum, signal.default_int_handler if signum == signal.SIGINT else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, setup.signal_mask)
    null = os.open(os.devnull, os.O_RDONLY)
    for source, destination in ((null, 0), (setup.stdout_fd, 1), (setup.stderr_fd, 2)):
        os.dup2(source, destination)
    for fd in {null, setup.stdout_fd, setup.stderr_fd, *setup.close_fds} - {0, 1, 2}:
        os.close(fd)
    sys.stdin = sys.__stdin__ = open(0, closefd=False)  # type: ignore[misc]  # noqa: SIM115
    sys.stdout = sys.__stdout__ = _line_buffered(1, sys.__stdout__)  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = _line_buffered(2, sys.__stderr__)  # type: ignore[misc]
    os.environ.clear()
    os.environ.update(setup.env)


def _line_buffered(fd: int, like: IO[str] | None) -> Any:
    # Line by line although it is a pipe: what a rank printed before it was killed is not lost.
    return open(
        fd,
        "w",
        buffering=1,
        closefd=False,
        encoding=getattr(like, "encoding", None),
        errors=getattr(like, "errors", None),
    )


def _leave_launcher_state_behind() -> None:
    """Undo what makes a forked process differ from a fresh one."""
    gc.enable()
    atexit._clear()
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        finalizer.atexit = False
    weakref.finalize._registered_with_atexit = False  # type: ignore[attr-defined]
    atexit.register(logging.shutdown)
    if multiprocessing_util := sys.modules.get("multiprocessing.util"):
        atexit.register(multiprocessing_util._exit_function)
    if numpy_random := sys.modules.get("numpy.random"):
        numpy_random.seed()  # every rank would draw the launcher's numbers; Python's `random` reseeds itself
    if torch := sys.modules.get("torch"):
        # OMP_NUM_THREADS counts when libgomp is loaded, which was before the fork.
        threads = os.environ["OMP_NUM_THREADS"].split(",")[0]
        if threads.isdigit() and torch.get_num_threads() != int(threads):
            torch.set_num_threads(int(threads))


def _call(target: Callable[[int], int], setup: RankSetup) -> int:
    pid = os.getpid()

    def report(status: int, peer_lost: bool = False) -> None:
        if status and os.getpid() == pid:  # how a child that the program forked ends is the program's concern
            message = FailureReport(setup.rank, time.monotonic_ns(), status, peer_lost)
            with contextlib.suppress(BrokenPipeError):  # the launcher is gone, and this rank with it
                os.write(setup.report_fd, message.to_bytes())

    try:
        status = target(setup.rank)
        report(status)
    except SystemExit as error:
        status = exit_status(error)
        report(status)
    except KeyboardInterrupt as error:
        print(f"rank {setup.rank} interrupted {_where(error)}", file=sys.stderr)
        _finish(0)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException as error:
        # The report goes first: the launcher then knows whose traceback follows.
        status = 1
        report(status, is_peer_loss(error))
        print_program_error(error)
    return status


def _where(error: BaseException) -> str:
    frames = traceback.extract_tb(program_traceback(error))
    if not frames:
        return "before its first line"
    return f"in {frames[-1].filename}:{frames[-1].lineno} ({frames[-1].name})"


def _finish(status: int) -> int:
    """What python does when a program has ended; returns its status."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    try:
        flush_output()
    except OSError:
        status = status or 120  # python's own status for output it could not write
    flush_c_output()
    return status
