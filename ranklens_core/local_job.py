"""The launcher's side of a local job: start the ranks, watch them, end them together, leave none behind."""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import signal
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import FrameType

from ranklens_core.errors import RankLensError
from ranklens_core.rank_failure import FailureReport, FirstFailure, RankFailure
from ranklens_core.rank_output import OutputHandler, RankStream
from ranklens_core.rank_process import (
    RankSetup,
    RankTarget,
    flush_c_output,
    handled_signals,
    run_rank,
)

_POLL_NS = 20_000_000  # only where the system has no pidfd


@dataclass
class _Rank:
    rank: int
    pid: int
    pidfd: int | None
    streams: tuple[RankStream, RankStream]
    report: FailureReport | None = None
    status: int | None = None  # None while it lives


class LocalJob:
    """All ranks of one run. On exit nothing is left: no process, no descriptor, no signal handler."""

    def __init__(self, nproc: int, grace_s: float, on_output: OutputHandler) -> None:
        self.ranks: list[_Rank] = []
        self.first_failure: RankFailure | None = None
        self.interrupted_by: int | None = None
        self._nproc, self._grace_ns, self._on_output = nproc, int(grace_s * 1e9), on_output
        self._ending = False
        self._failures = FirstFailure()
        self._kill_at_ns: int | None = None
        self._selector = selectors.DefaultSelector()
        self._report_fd, self._report_write_fd = _pipe()
        self._signal_fd, self._signal_write_fd = _pipe()
        self._old_handlers: dict[int, object] = {}

    def __enter__(self) -> LocalJob:
        for fd in (self._report_fd, self._signal_fd):
            self._selector.register(fd, selectors.EVENT_READ)
        if threading.current_thread() is threading.main_thread():
            for signum in handled_signals():
                self._old_handlers[signum] = signal.signal(signum, self._on_signal)
        return self

    def __exit__(self, *exc_info: object) -> None:
        # Not waited for before this: as long as dead ranks are zombies their group ids cannot be reused.
        for rank in self.ranks:
            _kill_group(rank.pid)
        for rank in self.ranks:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(rank.pid, 0)
        for signum, handler in self._old_handlers.items():
            signal.signal(signum, handler)  # type: ignore[arg-type]
        for rank in self.ranks:
            for stream in rank.streams:
                stream.close()
            if rank.pidfd is not None:
                os.close(rank.pidfd)
        self._selector.close()
        for fd in (self._report_fd, self._report_write_fd, self._signal_fd, self._signal_write_fd):
            os.close(fd)

    def start(self, target: RankTarget, env: Mapping[str, str]) -> None:
        """Fork all ranks."""
        sys.stdout.flush()
        sys.stderr.flush()
        flush_c_output()
        for rank in range(self._nproc):
            try:
                self._start_rank(rank, target, {**env, "RANK": str(rank), "LOCAL_RANK": str(rank)})
            except OSError as error:
                raise RankLensError(
                    f"could not start rank {rank} of {self._nproc}: {error.strerror}; "
                    f"use fewer ranks or raise the limit (ulimit -n, ulimit -u)"
                ) from error

    def statuses(self) -> tuple[int, ...]:
        return tuple(0 if rank.status is None else rank.status for rank in self.ranks)

    def _start_rank(self, rank: int, target: RankTarget, env: Mapping[str, str]) -> None:
        with contextlib.ExitStack() as undo:
            ends = []
            for _ in ("stdout", "stderr"):
                ends.append(os.pipe())
                for fd in ends[-1]:
                    undo.callback(os.close, fd)
            (out, out_write), (err, err_write) = ends
            # A signal must not reach the child before it has handlers of its own.
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, handled_signals())
            try:
                pid = os.fork()
                if pid == 0:
                    run_rank(
                        RankSetup(
                            rank,
                            os.getppid(),
                            out_write,
                            err_write,
                            self._report_write_fd,
                            (out, err, *self._own_fds()),
                            env,
                            mask,
                        ),
                        target,
                    )
                with contextlib.suppress(OSError):  # the child does the same; whoever comes first
                    os.setpgid(pid, pid)
                streams = (RankStream(rank, "stdout", out), RankStream(rank, "stderr", err))
                self.ranks.append(_Rank(rank, pid, _pidfd(pid), streams))
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            undo.pop_all()
        os.close(out_write)
        os.close(err_write)
        os.set_blocking(out, False)
        os.set_blocking(err, False)

    def _own_fds(self) -> list[int]:
        """What a rank must not keep: the launcher's ends of everything."""
        fds = [self._report_fd, self._signal_fd, self._signal_write_fd]
        for rank in self.ranks:
            fds += [stream.fd for stream in rank.streams]
            fds += [rank.pidfd] if rank.pidfd is not None else []
        return fds

    def watch(self) -> None:
        """Pass on output until every rank has ended; end them all when one fails or a signal comes."""
        for rank in self.ranks:
            if rank.pidfd is not None:
                self._selector.register(rank.pidfd, selectors.EVENT_READ)
        self._choose_streams()
        while any(rank.status is None for rank in self.ranks):
            ready = {key.fd: key.data for key, _ in self._selector.select(self._timeout_s())}
            # All this before output: a failure tells that some ranks' stderr has to wait.
            if self._read_signals() | self._read_failures(ready) | self._decide():
                self._choose_streams()
            for stream in ready.values():
                if stream is not None and stream.open and stream.fd in self._selector.get_map():
                    self._pass_on(stream)
            if self._kill_at_ns is not None and time.monotonic_ns() >= self._kill_at_ns:
                for rank in self.ranks:
                    _kill_group(rank.pid)
                self._kill_at_ns = None  # once is enough: SIGKILL cannot be refused
        self._pass_on_the_rest()

    def _timeout_s(self) -> float | None:
        at_ns = self._kill_at_ns if self._ending else self._failures.decide_at_ns
        due = [] if at_ns is None else [at_ns - time.monotonic_ns()]
        if any(rank.pidfd is None for rank in self.ranks):
            due.append(_POLL_NS)
        return max(0, min(due)) / 1e9 if due else None

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(self._signal_write_fd, bytes([signum]))

    def _read_signals(self) -> bool:
        signums = _read_all(self._signal_fd)
        for signum in signums:
            if self._ending:
                self._kill_at_ns = time.monotonic_ns()
            else:
                self.interrupted_by = signum
                self._ask_to_end(signal.SIGINT if signum == signal.SIGINT else signal.SIGTERM)
        return bool(signums)

    def _read_failures(self, ready: Mapping[int, object]) -> bool:
        # In this order: the reports of the ranks found ended are then surely in the pipe.
        ended = self._collect_ended(ready)
        reports = _read_all(self._report_fd)
        for offset in range(0, len(reports), FailureReport.SIZE):
            report = FailureReport.from_bytes(reports[offset : offset + FailureReport.SIZE])
            self.ranks[report.rank].report = report
            self._failures.add_report(report, time.monotonic_ns())
        for rank, status, signum in ended:
            # A rank that reported may have hung in its exit handlers and been killed.
            rank.status = rank.report.status if rank.report is not None else status
            if rank.report is None and status:
                self._failures.add_end(rank.rank, status, signum, time.monotonic_ns())
        return bool(reports or ended)

    def _collect_ended(self, ready: Mapping[int, object]) -> list[tuple[_Rank, int, int | None]]:
        """The ranks that have ended since the last call: rank, status, signal that killed it."""
        ended = []
        for rank in self.ranks:
            if rank.status is not None or (rank.pidfd is not None and rank.pidfd not in ready):
                continue
            info = os.waitid(os.P_PID, rank.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if info is None:
                continue
            if rank.pidfd is not None:
                self._selector.unregister(rank.pidfd)
            signum = None if info.si_code == os.CLD_EXITED else info.si_status
            ended.append((rank, info.si_status if signum is None else 128 + signum, signum))
        return ended

    def _decide(self) -> bool:
        if self._ending:
            return False
        others_may_fail = any(rank.status is None and rank.report is None for rank in self.ranks)
        self.first_failure = self._failures.decide(time.monotonic_ns(), others_may_fail)
        if self.first_failure is None:
            return False
        self._ask_to_end(signal.SIGTERM)
        return True

    def _ask_to_end(self, signum: signal.Signals) -> None:
        self._ending = True
        self._kill_at_ns = time.monotonic_ns() + self._grace_ns
        for rank in self.ranks:
            if rank.status is None and rank.report is None:
                os.kill(rank.pid, signum)

    def _choose_streams(self) -> None:
        """Read all stdout; of stderr only what may be shown now, so that the first failing rank's comes
        first."""
        for rank in self.ranks:
            for stream in rank.streams:
                wanted = stream.open and (stream.name == "stdout" or self._may_show(rank))
                registered = stream.open and stream.fd in self._selector.get_map()
                if wanted and not registered:
                    self._selector.register(stream.fd, selectors.EVENT_READ, stream)
                elif registered and not wanted:
                    self._selector.unregister(stream.fd)

    def _may_show(self, rank: _Rank) -> bool:
        if self.first_failure is None:
            return rank.report is None or self.interrupted_by is not None
        failing = self.ranks[self.first_failure.rank]
        return rank is failing or (failing.status is not None and not failing.streams[1].open)

    def _pass_on(self, stream: RankStream) -> None:
        lines = stream.read()
        if not stream.open:
            self._selector.unregister(stream.fd)
            self._choose_streams()
        if lines:
            self._on_output(stream.rank, stream.name, lines)

    def _pass_on_the_rest(self) -> None:
        """What is still in the pipes; descendants that a rank left behind are ended first, or they would
        add to it."""
        for rank in self.ranks:
            _kill_group(rank.pid)
        first = self.first_failure.rank if self.first_failure is not None else -1
        for rank in sorted(self.ranks, key=lambda rank: rank.rank != first):
            for stream in rank.streams:
                for lines in (stream.read(), stream.close()):
                    if lines:
                        self._on_output(stream.rank, stream.name, lines)


def _pipe() -> tuple[int, int]:
    """A pipe whose ends never block."""
    ends = os.pipe()
    for fd in ends:
        os.set_blocking(fd, False)
    return ends


def _read_all(fd: int) -> bytes:
    data = b""
    with contextlib.suppress(BlockingIOError):
        while chunk := os.read(fd, 1 << 16):
            data += chunk
    return data


def _pidfd(pid: int) -> int | None:
    """A descriptor that turns readable when the process ends (Linux 5.3); None where there is none."""
    if not hasattr(os, "pidfd_open"):
        return None
    try:
        return os.pidfd_open(pid)
    except OSError as error:
        if error.errno == errno.ENOSYS:
            return None
        raise


def _kill_group(pid: int) -> None:
    """SIGKILL a rank and the processes it started; only for ranks that have not been waited for."""
    with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS: EPERM for a group of zombies
        os.killpg(pid, signal.SIGKILL)
