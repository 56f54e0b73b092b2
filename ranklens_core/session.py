"""A recording or a replay from begin to end: wiring, installing, undoing, judging."""

from __future__ import annotations

import logging
import os
import secrets
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch.distributed as dist

from ranklens_core import environment
from ranklens_core.adapters import TIMER_FILES, Adapters
from ranklens_core.c10d.groups import Groups
from ranklens_core.c10d.interpose import install
from ranklens_core.c10d.signature import Signatures
from ranklens_core.c10d.site import Sites
from ranklens_core.c10d.world import OneRankWorld, let_fake_groups_coalesce
from ranklens_core.clock import Clock, MonotonicClock
from ranklens_core.errors import RankLensError, StructureMismatchError, UsageError, ValuesMissingError
from ranklens_core.patches import Patches
from ranklens_core.printed import PrintedMetrics
from ranklens_core.program import Program
from ranklens_core.record import Recorder, Values
from ranklens_core.replay import Replayer, WindowEnded
from ranklens_core.schema import (
    OLDEST_READER,
    TRACE_VERSION,
    GroupRecord,
    Printed,
    RankRecord,
    RunRecord,
    Step,
)
from ranklens_core.steps import OptimizerSteps, Steps
from ranklens_core.task import OnMismatch, Result, Task, task_named
from ranklens_core.trace import RankHeader, Trace, TraceWriter, content_address, open_trace, prepare_directory
from ranklens_core.verdict import (
    VERDICT_VERSION,
    CallCounts,
    PrintedResult,
    Provenance,
    Status,
    StepResult,
    StructureResult,
    TimingResult,
    ValuesResult,
    Verdict,
)

log = logging.getLogger("ranklens")


@dataclass(frozen=True)
class RankEnvironment:
    """This process's place in the job, as its launcher set it."""

    rank: int
    world_size: int
    local_rank: int

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> RankEnvironment:
        """From RANK, WORLD_SIZE and LOCAL_RANK (torchrun, DeepSpeed, Slurm, Open MPI)."""
        rank = _first(environ, "RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
        world = _first(environ, "WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
        if rank is None or world is None:
            raise UsageError(
                "This process is no rank of a job: RANK and WORLD_SIZE are not set. Start it with "
                "torchrun, deepspeed, srun or mpirun, or let RankLens start local ranks: --nproc N."
            )
        local = _first(environ, "LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK")
        return cls(rank, world, local if local is not None else rank)


def _first(environ: Mapping[str, str], *names: str) -> int | None:
    for name in names:
        if name in environ:
            try:
                return int(environ[name])
            except ValueError:
                raise UsageError(f"{name}={environ[name]!r} is no number.") from None
    return None


def run_id_of(environ: Mapping[str, str]) -> str:
    """A run id that all ranks of a job find by themselves: its launcher's variables are the same in each.

    Two jobs of one launcher and address share it; a rank's own directory still tells runs apart.
    """
    names = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "SLURM_JOB_ID", "SLURM_STEP_ID")
    names += ("OMPI_COMM_WORLD_JOBID", "PMIX_NAMESPACE", "MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE")
    text = "\0".join(f"{name}={environ.get(name, '')}" for name in names)
    return content_address(text.encode()).hex()[:16]


def describe_run(
    program: Program | None, world_size: int, *, cpu_cuda: bool, run_id: str = ""
) -> RunRecord:
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
        overwrite: bool = False,
        clock: Clock | None = None,
    ) -> None:
        prepare_directory(directory, overwrite, rank=place.rank)
        clock = clock or MonotonicClock()
        header = RankHeader(
            rank=place.rank,
            host=socket.gethostname(),
            pid=os.getpid(),
            local_rank=place.local_rank,
            has_values=keep_values,
            value_steps=window,
            monotonic_ns=clock.now_ns(),
            realtime_ns=clock.realtime_ns(),
        )
        self.writer = TraceWriter(directory, run, header, clock=clock)
        for item in environment.capture():
            self.writer.environment(item)
        self.steps = Steps(clock, self._name_roles, self._step_ended)
        self._groups = Groups(self.writer.group)
        self.adapters = Adapters(self.steps, strict=False)
        signatures = Signatures(self._groups, Sites(TIMER_FILES), self.writer.signature)
        self.recorder = Recorder(self.writer, signatures, self.steps, Values(keep_values, window), clock)
        self._optimizer_steps = OptimizerSteps(self.steps)
        self._printed = PrintedMetrics(self.writer.printed)
        self._reads = environment.VariableReads(self.writer.environment)
        self._interposer = install(self.recorder)

    def close(self, exit_status: int | None) -> None:
        """Undo everything and finish the trace. ``exit_status`` is the program's, None if unknown."""
        self._interposer.remove()
        self._reads.remove()
        self._printed.remove()
        self._optimizer_steps.remove()
        self._name_roles()
        self.adapters.remove()
        self._groups.close()
        self.writer.close(exit_status)
        if self.writer.failure:
            log.error("the trace of rank %s is incomplete: %s", self.rank, self.writer.failure)

    @property
    def rank(self) -> int:
        return self.writer.rank

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


class ReplaySession:
    """Replays one rank from creation until ``close``, which makes the ``verdict``."""

    def __init__(
        self,
        trace: Trace,
        rank: int,
        task: Task,
        *,
        on_mismatch: OnMismatch | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._patches = Patches()
        self.trace, self.rank, self.task = trace, rank, task
        self._rank_trace = trace.rank(rank)
        self.record: RankRecord = self._rank_trace.record
        self.verdict: Verdict | None = None
        if task.result is Result.RECORDED and not self.record.has_values:
            raise ValuesMissingError(
                f"Rank {rank} was recorded without values, which --task {task.name} restores. Ranks with "
                f"values: {_ranks_with_values(trace)}. Record again with --payload {rank}, or use "
                "--task structure."
            )
        clock = clock or MonotonicClock()
        try:
            self._install(clock, on_mismatch or task.on_mismatch)
        except BaseException:
            self._undo()
            raise

    def _install(self, clock: Clock, on_mismatch: OnMismatch) -> None:
        record, world_size = self.record, self.trace.world_size
        check_place(os.environ, self.rank, world_size)
        self._set_place(world_size)
        self._environment = environment.restore(record.environment, self._patches)
        world = OneRankWorld(self.rank, world_size)
        self._patches.on_undo(world.remove)
        let_fake_groups_coalesce(self._patches, self._backend())
        self._made: list[GroupRecord] = []
        groups = Groups(self._made.append)
        self._patches.on_undo(groups.close)
        self.steps = Steps(clock, lambda: None, lambda _: None)
        self.adapters = Adapters(self.steps, strict=False)
        self._patches.on_undo(self.adapters.remove)
        signatures = Signatures(groups, Sites(TIMER_FILES), lambda _: None)
        recorded = {group.key: group for group in record.groups}
        self.replayer = Replayer(
            self._rank_trace, self.task, on_mismatch, signatures, self.steps, recorded
        )
        self._patches.on_undo(OptimizerSteps(self.steps).remove)
        self._printed: list[Printed] = []
        self._patches.on_undo(PrintedMetrics(self._printed.append).remove)
        self._patches.on_undo(install(self.replayer).remove)

    def close(self, error: BaseException | None = None) -> Verdict:
        """Undo everything and judge; ``error`` is what ended the program, None for its own end."""
        self._undo()
        status, message = self._judge(error)
        self.verdict = self._verdict(status, message)
        return self.verdict

    def _undo(self) -> None:
        self._patches.undo()
        self._rank_trace.close()

    def _backend(self) -> str:
        return self.record.groups[0].backend if self.record.groups else ""

    def _set_place(self, world_size: int) -> None:
        """RANK and its kin as the launcher had set them, but on this machine's devices."""
        import torch

        local_rank = self.record.local_rank
        if torch.cuda.is_available() and local_rank >= torch.cuda.device_count():
            local_rank = 0
        place = {
            "RANK": self.rank,
            "WORLD_SIZE": world_size,
            "LOCAL_RANK": local_rank,
            "LOCAL_WORLD_SIZE": max(local_rank + 1, self._local_world_size()),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": 29500,
        }
        for name, value in place.items():
            self._patches.setitem(os.environ, name, str(value))

    def _local_world_size(self) -> int:
        return sum(record.host == self.record.host for record in self.trace.ranks.values())

    def _judge(self, error: BaseException | None) -> tuple[Status, str]:
        replayer = self.replayer
        fatal = replayer.fatal or (error if isinstance(error, RankLensError) else None)
        if isinstance(fatal, StructureMismatchError):
            return Status.STRUCTURE_MISMATCH, ""
        if fatal is not None:
            by_exit = {5: Status.TRACE_ENDED, 6: Status.UNSUPPORTED, 2: Status.USAGE}
            return by_exit[fatal.exit_status], str(fatal)
        if error is not None and not _is_success(error):
            return Status.PROGRAM_FAILED, f"{type(error).__name__}: {error}"
        if replayer.first_mismatch is not None:
            return Status.STRUCTURE_MISMATCH, ""
        missing = "" if isinstance(error, WindowEnded) else replayer.missing()
        if missing and replayer.matched < replayer.total:
            return Status.STRUCTURE_MISMATCH, missing
        if replayer.scores.first_divergence is not None:
            return Status.VALUES_DIVERGED, ""
        if isinstance(error, WindowEnded):
            return Status.OK, f"the recorded window ends before step {self.steps.index}"
        return Status.OK, ""

    def _verdict(self, status: Status, message: str) -> Verdict:
        replayer = self.replayer
        return Verdict(
            version=VERDICT_VERSION,
            task=self.task.name,
            rank=self.rank,
            world_size=self.trace.world_size,
            status=status,
            message=message,
            calls=CallCounts(recorded=replayer.total, replayed=replayer.replayed),
            structure=StructureResult(
                matched=replayer.matched,
                total=replayer.total,
                training_matched=replayer.training_matched,
                training_total=replayer.training_total,
                first_mismatch=replayer.first_mismatch,
            ),
            values=ValuesResult(
                identical=replayer.scores.identical,
                compared=replayer.scores.compared,
                first_divergence=replayer.scores.first_divergence,
            ),
            provenance=Provenance(
                result={source: replayer.provenance[source] for source in Result},
                time={"recorded": 0, "estimated": 0, "none": replayer.replayed},
            ),
            steps=self._step_results(),
            timing=TimingResult(mean_abs_error_pct=None, worst_abs_error_pct=None),
            environment=tuple(self._environment),
            printed=compare_printed(self.record.printed, self._printed),
            bypassed=(),
            roles=tuple(role_text(group, self.rank) for group in self._role_groups()),
            versions=tuple(
                item
                for item in environment.versions()
                if item.name in ("deepspeed", "megatron-core", "torch") and self._uses(item.name)
            ),
        )

    def _uses(self, distribution: str) -> bool:
        frameworks = {"megatron-core": "megatron", "deepspeed": "deepspeed"}
        wanted = frameworks.get(distribution)
        return wanted is None or wanted in self.frameworks

    @property
    def frameworks(self) -> tuple[str, ...]:
        """Frameworks the program imported, as the adapters name them."""
        return tuple(adapter.framework for adapter in self.adapters.active) or self._were_active

    _were_active: tuple[str, ...] = ()

    def _role_groups(self) -> list[GroupRecord]:
        shown = ("tp", "pp", "dp", "ep", "cp", "pipe", "model", "expert", "sp")
        best: dict[str, GroupRecord] = {}
        for group in self.record.groups:
            for role in group.role.split("+"):
                if role in shown:
                    best.setdefault(role, group)
        return [
            GroupRecord(
                key=group.key,
                pg_name=group.pg_name,
                pg_desc=group.pg_desc,
                backend=group.backend,
                ranks=group.ranks,
                role=role,
            )
            for role, group in sorted(best.items(), key=lambda item: shown.index(item[0]))
        ]

    def _step_results(self) -> tuple[StepResult, ...]:
        recorded = {step.index: step.end_ns - step.begin_ns for step in self.record.steps}
        return tuple(
            StepResult(
                index=step.index,
                wall_ns=step.end_ns - step.begin_ns,
                recorded_ns=recorded.get(step.index),
                error_pct=None,
            )
            for step in self.steps.done
        )


def check_place(environ: Mapping[str, str], rank: int, world_size: int) -> None:
    """Refuse an environment that says something else than what is to be replayed.

    Raises ``UsageError`` if RANK or WORLD_SIZE is set and differs.
    """
    for name, wanted in (("WORLD_SIZE", world_size), ("RANK", rank)):
        value = environ.get(name)
        if value is not None and value != str(wanted):
            raise UsageError(
                f"This environment says {name}={value}, but the replay is of rank {rank} of {world_size}. "
                f"A replay is one plain process: start it without torchrun, or unset {name}."
            )


def compare_printed(recorded: tuple[Printed, ...], now: list[Printed]) -> PrintedResult:
    """Printed losses and norms against the recorded ones, text against text, in order."""
    pairs = list(zip(recorded, now, strict=False))
    differing = [(i, then, here) for i, (then, here) in enumerate(pairs) if then != here]
    first = ""
    if differing:
        index, then, here = differing[0]
        first = f"printed {here.name} {here.text}, recorded {then.name} {then.text} (number {index})"
    return PrintedResult(
        identical=len(pairs) - len(differing),
        compared=len(pairs),
        last={metric.name: metric.text for metric in now},
        first_difference=first,
    )


def role_text(group: GroupRecord, rank: int) -> str:
    """``tp 1/2``: this rank's place in the group and the group's size."""
    return f"{group.role} {group.ranks.index(rank)}/{len(group.ranks)}"


def _is_success(error: BaseException) -> bool:
    return isinstance(error, SystemExit) and error.code in (None, 0)


def _ranks_with_values(trace: Trace) -> str:
    ranks = [str(rank) for rank, record in trace.ranks.items() if record.has_values]
    return ", ".join(ranks) if ranks else "none"


@contextmanager
def record(
    directory: str | os.PathLike[str],
    *,
    payload: str | bool = "all",
    steps: tuple[int, int | None] | None = None,
    program: Program | None = None,
    run: RunRecord | None = None,
    overwrite: bool = False,
) -> Iterator[RecordSession]:
    """Record the calls made inside the block, on this rank, into ``directory``.

    ``payload`` is ``"all"``, ``"none"`` or ``"R,R,..."``: the ranks whose values are kept. ``steps``
    is the window ``(first, end)`` whose inputs can be compared later.
    """
    place = RankEnvironment.from_environ(os.environ)
    session = RecordSession(
        Path(directory),
        run or describe_run(program, place.world_size, cpu_cuda=False, run_id=run_id_of(os.environ)),
        place,
        keep_values=keeps_values(payload, place.rank),
        window=steps,
        overwrite=overwrite,
    )
    status: int | None = 1
    try:
        yield session
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        raise
    finally:
        session.close(status)


@contextmanager
def replay(
    directory: str | os.PathLike[str],
    rank: int,
    task: str = "debug",
    *,
    on_mismatch: OnMismatch | None = None,
) -> Iterator[ReplaySession]:
    """Run the block as ``rank`` of the recorded job; ``session.verdict`` is there afterwards.

    Raises ``UsageError`` for a rank outside the world and ``TraceError`` for an unusable trace
    before the block runs; in it, what ``Replayer`` raises.
    """
    session = ReplaySession(open_trace(directory), rank, task_named(task), on_mismatch=on_mismatch)
    error: BaseException | None = None
    try:
        yield session
    except BaseException as caught:
        error = caught
        raise
    finally:
        session.close(error)


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
