"""Local ranks: N processes of one job on this machine, started, watched and ended together.

Ranks are forked after the frameworks have been imported once, so they share that memory: this is for the CPU.
``start_method="spawn"`` starts fresh interpreters instead, which CUDA needs.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import logging
import os
import random
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ranklens_core.errors import UsageError
from ranklens_core.local_job import LocalJob
from ranklens_core.rank_failure import RankFailure
from ranklens_core.rank_output import OutputHandler, write_output
from ranklens_core.rank_process import RankTarget

PORTS = (20_000, 30_000)
"""Where MASTER_PORT is chosen: below the ephemeral ports of Linux (32768 on) and other systems."""

__all__ = ["ClusterResult", "OutputHandler", "RankFailure", "run_local"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ClusterResult:
    """How a local job ended.

    ``statuses``: one a rank, 128 + signal number for killed ones; once a rank has failed, the others' say
    only how they were ended. ``interrupted_by``: the signal (Ctrl-C: 2) that ended the job from outside.
    """

    statuses: tuple[int, ...]
    first_failure: RankFailure | None
    interrupted_by: int | None
    wall_ns: int

    @property
    def status(self) -> int:
        """The job's exit status: the first failing rank's own, 128 + signal if interrupted, else 0."""
        if self.first_failure is not None:
            return self.first_failure.status
        return 0 if self.interrupted_by is None else 128 + self.interrupted_by


def run_local(
    nproc: int,
    target: RankTarget,
    *,
    start_method: str = "fork",
    preimport: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    master_port: int | None = None,
    grace_s: float = 5.0,
    on_output: OutputHandler | None = None,
) -> ClusterResult:
    """Run ``nproc`` ranks to their end.

    Args:
        target: for "fork" a function that is given the rank and returns its exit status; for "spawn" the
            arguments of a fresh ``python`` (``["-m", "ranklens_core", "record", ...]``), which finds its
            rank in RANK.
        preimport: modules to import before forking ("fork" only). They must not compute: a parallel OpenMP
            region before ``fork()`` can hang the ranks. One that cannot be imported is logged; the rank
            will say it again.
        env: variables on top of this process's. RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, GROUP_RANK,
            NODE_RANK, MASTER_ADDR and MASTER_PORT are set for each rank, OMP_NUM_THREADS to 1 unless set.
        master_port: default is a port that was free a moment ago. Another process can take it before rank 0
            binds it; the program then fails with "address already in use" and is to be started again.
        grace_s: seconds between asking ranks to end (SIGTERM; SIGINT after Ctrl-C) and SIGKILL.
        on_output: default writes to this process's stdout and stderr. Lines of different ranks never mix.
            After a failure the failing rank's stderr comes first, the other ranks' when it has ended.

    The first failure ends all ranks. SIGINT, SIGTERM and SIGHUP end them too when called from the main
    thread; a second one at once. Fork with no other Python threads at work (a live progress display, say):
    their locks stay locked in the ranks.

    Raises:
        UsageError: nproc below 1, an unknown start method, or a target that does not fit it.
        RankLensError: the system refuses so many processes or pipes.
    """
    if nproc < 1:
        raise UsageError(f"--nproc {nproc}: at least one rank is needed")
    if start_method not in ("fork", "spawn"):
        raise UsageError(f"start method {start_method!r}: choose fork (CPU) or spawn (GPU)")
    if callable(target) != (start_method == "fork"):
        raise UsageError(
            "fork runs a function, spawn runs the arguments of a fresh python; "
            f"start_method={start_method!r} was given {type(target).__name__}"
        )
    base_env = {"OMP_NUM_THREADS": "1", **os.environ, **(env or {})}
    base_env.pop("TORCHELASTIC_USE_AGENT_STORE", None)  # would make ranks wait for torchrun's store
    job_env = base_env | {
        "WORLD_SIZE": str(nproc),
        "LOCAL_WORLD_SIZE": str(nproc),
        "GROUP_RANK": "0",
        "NODE_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(master_port or _free_port()),
    }
    started_ns = time.monotonic_ns()
    with LocalJob(nproc, grace_s, on_output or write_output) as job:
        with _quiet_heap():
            if start_method == "fork":
                _import_all(preimport, base_env)
            gc.freeze()
            job.start(target, job_env)
        job.watch()
    return ClusterResult(
        statuses=job.statuses(),
        first_failure=job.first_failure,
        interrupted_by=job.interrupted_by,
        wall_ns=time.monotonic_ns() - started_ns,
    )


def _import_all(names: Sequence[str], env: Mapping[str, str]) -> None:
    """Import frameworks with the job's environment: some read it only while they are being imported."""
    saved = dict(os.environ)
    os.environ.update(env)
    try:
        for name in names:
            try:
                importlib.import_module(name)
            except Exception as error:
                logger.warning("could not import %s before starting the ranks: %s", name, error)
    finally:
        os.environ.clear()
        os.environ.update(saved)


@contextlib.contextmanager
def _quiet_heap() -> Iterator[None]:
    """No garbage collection until the ranks are forked: it writes to pages that they could share."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        if was_enabled:
            gc.enable()


def _free_port() -> int:
    """A port nobody listens on. Not from the system's ephemeral range: there any connection made
    before rank 0 binds it could take it."""
    ports = random.Random(time.monotonic_ns() ^ os.getpid())
    while True:
        port = ports.randrange(*PORTS)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
