"""A recording of one rank from begin to end: wiring, installing, undoing."""

from __future__ import annotations

import logging
import os
import secrets
import socket
from datetime import UTC, datetime
from pathlib import Path

import torch.distributed as dist

from ranklens_core import environment
from ranklens_core.active import mark_active
from ranklens_core.adapters import TIMER_FILES, Adapters
from ranklens_core.bypass import Bypasses
from ranklens_core.c10d.groups import Groups
from ranklens_core.c10d.interpose import install
from ranklens_core.c10d.meeting import Meeting
from ranklens_core.c10d.signature import Signatures
from ranklens_core.c10d.site import Sites, error_place
from ranklens_core.clock import Clock, MonotonicClock
from ranklens_core.errors import UsageError
from ranklens_core.leaving import before_exec, before_exit
from ranklens_core.own_cores import CorePlan
from ranklens_core.patches import Patches
from ranklens_core.place import RankEnvironment
from ranklens_core.printed import PrintedMetrics
from ranklens_core.program import Program
from ranklens_core.recorder import Recorder, Values
from ranklens_core.schema import (
    OLDEST_READER,
    TRACE_VERSION,
    EnvironmentItem,
    GroupRecord,
    RunRecord,
    Signature,
    Step,
)
from ranklens_core.steps import OptimizerSteps, Steps
from ranklens_core.trace import (
    RUN_FILE,
    RankHeader,
    TraceWriter,
    prepare_directory,
    remove_ranks_outside,
    write_run,
)
from ranklens_core.trace.writer import FLUSH_INTERVAL_S

log = logging.getLogger("ranklens")

LINGER_NS = int((FLUSH_INTERVAL_S + 0.1) * 1e9)
"""How long a rank that failed stays: a flush of the others, and time to write it."""

MAX_ERROR_CHARS = 500
"""How much of an exception's message is kept in the journal."""


def describe_run(program: Program | None, world_size: int, *, cpu_cuda: bool, run_id: str = "") -> RunRecord:
    """The ``RunRecord`` of a recording that begins now."""
    return RunRecord(
        format=TRACE_VERSION,
        oldest_reader=OLDEST_READER,
        run_id=run_id or secrets.token_hex(8),
        world_size=world_size,
        program=program.describe() if program else "",
        program_fingerprint=program.fingerprint() if program else "",
        arguments=program.args if program else (),
        framework="",
        backend="",
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        clock="wall",
        network="",
        cpu_cuda=cpu_cuda,
    )


class RecordSession:
    """Records this rank from creation until ``close``."""

    def __init__(
        self,
        directory: Path,
        run: RunRecord,
        place: RankEnvironment,
        *,
        keep_values: bool,
        window: tuple[int, int | None] | None = None,
        window_only: bool = False,
        overwrite: bool = False,
        every_input: bool = False,
        clock: Clock | None = None,
        cores: CorePlan | None = None,
    ) -> None:
        self._cores = cores
        directory = directory.absolute()  # files are added while the program may change its directory
        if place.local_rank == 0:
            remove_ranks_outside(directory, run.world_size, overwrite)
        prepare_directory(directory, overwrite, rank=place.rank)
        clock = clock or MonotonicClock()
        header = RankHeader(
            rank=place.rank,
            host=socket.gethostname(),
            pid=os.getpid(),
            local_rank=place.local_rank,
            has_values=keep_values,
            value_steps=window,
            window_only=window_only,
            monotonic_ns=clock.now_ns(),
            realtime_ns=clock.realtime_ns(),
        )
        if place.rank == 0:
            _write_run_file(directory, run)  # over one that is there: it may be of an overwritten trace
        self._clock, self._world_size = clock, run.world_size
        self.writer = TraceWriter(directory, run, header, clock=clock)
        self._patches = Patches()
        mark_active(self._patches)
        for item in environment.capture():
            self.writer.environment(item)
        self.steps = Steps(clock, self._name_roles, self._step_ended)
        self._groups = Groups(self._new_group)
        self._meeting = Meeting(self.writer.meeting)
        self.adapters = Adapters(self.steps, strict=False)
        self._bypassed: set[str] = set()
        self._bypasses = Bypasses(self._bypass_used)
        signatures = Signatures(self._groups, Sites(TIMER_FILES), self._new_signature)
        values = Values(keep_values, window, window_only=window_only, every_input=every_input)
        self.recorder = Recorder(self.writer, signatures, self.steps, values, clock)
        self.writer.watch(self.recorder.activity)
        self._optimizer_steps = OptimizerSteps(self.steps)
        self._printed = PrintedMetrics(self.writer.printed, lambda: self.steps.index)
        self._reads = environment.VariableReads(self.writer.environment)
        self._interposer = install(self.recorder)
        before_exit(self._patches, self._last_words)
        before_exec(self._patches, self._end_before_exec)

    def close(self, exit_status: int | None, error: BaseException | None = None) -> None:
        """Undo everything and finish the trace. ``exit_status`` is the program's, None if unknown; ``error``
        is what it ended with."""
        self._patches.undo()
        self._interposer.remove()
        self._reads.remove()
        self._printed.remove()
        self._optimizer_steps.remove()
        self._name_roles()
        self.adapters.remove()
        self._meeting.remove()
        self._bypasses.remove()
        self._groups.close()
        if error is None or isinstance(error, SystemExit):
            self.writer.close(exit_status)
        else:
            self.writer.close(exit_status, _one_line(error), error_place(error))
        if self.writer.failure:
            log.error("the trace of rank %s is incomplete: %s", self.rank, self.writer.failure)

    def linger(self) -> None:
        """The program failed here: stay until the other ranks have flushed.

        When this process ends the launcher ends the others, at once and by a signal that Python does not see
        while a rank waits for this one in C++. What they did up to now would be lost.
        """
        if self._world_size > 1:
            self._clock.sleep_until(self._clock.now_ns() + LINGER_NS)

    @property
    def rank(self) -> int:
        return self.writer.rank

    def _last_words(self, status: int) -> int:
        """The program leaves by ``os._exit``, maybe past something that hangs: only the trace is ended."""
        self.writer.close(status)
        if status:
            self.linger()
        return status

    def _end_before_exec(self, what: str) -> None:
        """The program replaces itself: what it becomes is not recorded, and the trace says so."""
        reason = f"the program replaced itself by {what}, and what it became was not recorded"
        log.warning(
            "%s: the trace of rank %s ends here. Do first what the program starts over for (often a "
            "variable: set it before the recording), so that it need not.",
            reason,
            self.rank,
        )
        self.writer.fail(reason)
        self.writer.close(None)

    def _new_group(self, group: GroupRecord) -> None:
        self.writer.group(group)
        if self._cores is not None:
            # the backend has threads for the group by now
            self._cores.move_helpers(self.rank)

    def _bypass_used(self, name: str, message: str) -> None:
        if name not in self._bypassed:
            self._bypassed.add(name)
            log.warning("%s", message)
            self.writer.environment(EnvironmentItem(kind=environment.BYPASSED, name=name, value="used"))

    def _new_signature(self, signature: Signature) -> None:
        self.writer.signature(signature)

    def _name_roles(self) -> None:
        if not dist.is_initialized():
            return
        for pg, role in self.adapters.roles().items():
            key = self._groups.key_of(pg)
            if key is not None:
                self.writer.role(key, role)

    def _step_ended(self, step: Step) -> None:
        self.writer.step(step)
        if step.index == 0:
            self._name_roles()
            if self._cores is not None:
                self._cores.move_helpers(self.rank)


def _one_line(error: BaseException) -> str:
    """``Type: message`` without what follows the message's first line, where C++ puts its own stack."""
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0][:MAX_ERROR_CHARS] if lines else ''}"


def _write_run_file(directory: Path, run: RunRecord) -> None:
    try:
        write_run(directory, run)
    except OSError as error:
        # each rank's journal repeats the run: the trace can be opened without the file
        log.warning("%s cannot be written: %s", directory / RUN_FILE, error)


def keeps_values(payload: str | bool, rank: int) -> bool:
    """Whether ``rank``'s values are kept under ``--payload`` (all, none, or a list of ranks)."""
    if isinstance(payload, bool):
        return payload
    if payload in ("all", "none"):
        return payload == "all"
    try:
        return rank in [int(part) for part in payload.split(",")]
    except ValueError:
        raise UsageError(f"--payload takes all, none or ranks like 0,5,7, not {payload!r}.") from None
