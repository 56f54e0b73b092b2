"""A replay of one rank from begin to end: wiring, installing, undoing, judging."""

from __future__ import annotations

import os

import torch

from ranklens_core import environment
from ranklens_core.adapters import TIMER_FILES, Adapters
from ranklens_core.c10d.groups import Groups
from ranklens_core.c10d.interpose import install
from ranklens_core.c10d.signature import Signatures
from ranklens_core.c10d.site import Sites
from ranklens_core.c10d.world import OneRankWorld, let_fake_groups_coalesce
from ranklens_core.clock import Clock, MonotonicClock
from ranklens_core.errors import RankLensError, StructureMismatchError, ValuesMissingError
from ranklens_core.matching import Matcher, WindowEnded
from ranklens_core.patches import Patches
from ranklens_core.place import check_place
from ranklens_core.printed import PrintedMetrics
from ranklens_core.replayer import Replayer
from ranklens_core.schema import GroupRecord, Printed, RankRecord
from ranklens_core.steps import OptimizerSteps, Steps
from ranklens_core.task import OnMismatch, Result, Task
from ranklens_core.trace import Trace
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
        self.matcher = Matcher(
            self._rank_trace,
            recorded,
            stops=on_mismatch is OnMismatch.STOP,
            keeps_window=self.task.result is Result.RECORDED,
        )
        self.replayer = Replayer(self._rank_trace, self.matcher, self.task, signatures, self.steps, recorded)
        self._patches.on_undo(OptimizerSteps(self.steps).remove)
        self._printed: list[Printed] = []
        self._patches.on_undo(PrintedMetrics(self._printed.append).remove)
        self._patches.on_undo(install(self.replayer).remove)

    def close(self, error: BaseException | None = None) -> Verdict:
        """Undo everything and judge; ``error`` is what ended the program, None for its own end."""
        self._frameworks = {adapter.framework for adapter in self.adapters.active}
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
        replayer, matcher = self.replayer, self.matcher
        fatal = replayer.fatal or (error if isinstance(error, RankLensError) else None)
        if isinstance(fatal, StructureMismatchError):
            return Status.STRUCTURE_MISMATCH, ""
        if fatal is not None:
            by_exit = {5: Status.TRACE_ENDED, 6: Status.UNSUPPORTED, 2: Status.USAGE}
            return by_exit[fatal.exit_status], str(fatal)
        if error is not None and not _is_success(error):
            return Status.PROGRAM_FAILED, f"{type(error).__name__}: {error}"
        if matcher.first_mismatch is not None:
            return Status.STRUCTURE_MISMATCH, ""
        missing = "" if isinstance(error, WindowEnded) else matcher.missing()
        if missing and matcher.matched < matcher.total:
            return Status.STRUCTURE_MISMATCH, missing
        if replayer.scores.first_divergence is not None:
            return Status.VALUES_DIVERGED, ""
        if isinstance(error, WindowEnded):
            return Status.OK, f"the recorded window ends before step {self.steps.index}"
        return Status.OK, ""

    def _verdict(self, status: Status, message: str) -> Verdict:
        replayer, matcher = self.replayer, self.matcher
        return Verdict(
            version=VERDICT_VERSION,
            task=self.task.name,
            rank=self.rank,
            world_size=self.trace.world_size,
            status=status,
            message=message,
            calls=CallCounts(recorded=matcher.total, replayed=replayer.replayed),
            structure=StructureResult(
                matched=matcher.matched,
                total=matcher.total,
                training_matched=matcher.training_matched,
                training_total=matcher.training_total,
                first_mismatch=matcher.first_mismatch,
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
            # made-up results give made-up losses: comparing them would say nothing
            printed=compare_printed(
                self.record.printed if self.task.result is Result.RECORDED else (), self._printed
            ),
            bypassed=(),
            roles=tuple(role_text(group, self.rank) for group in self._role_groups()),
            versions=tuple(
                item
                for item in environment.versions()
                if item.name in ("deepspeed", "megatron-core", "torch") and self._uses(item.name)
            ),
        )

    def _uses(self, distribution: str) -> bool:
        module = {"megatron-core": "megatron", "deepspeed": "deepspeed"}.get(distribution)
        return module is None or module in self._frameworks

    def _role_groups(self) -> list[GroupRecord]:
        shown = ("tp", "pp", "dp", "ep", "cp", "pipe", "model", "expert", "sp")
        best: dict[str, GroupRecord] = {}
        for group in self.record.groups:
            for role in group.role.split("+"):
                if role in shown and (len(group.ranks) > 1 or role in ("tp", "pp", "dp")):
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
