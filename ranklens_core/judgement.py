"""From what a replay or an emulation saw to its ``Verdict``."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ranklens_core import environment
from ranklens_core.delivery import TimeSource
from ranklens_core.errors import RankLensError, StructureMismatchError
from ranklens_core.lone_rank import LoneRank
from ranklens_core.matching import Matcher
from ranklens_core.replayer import Replayer
from ranklens_core.schema import GroupRecord, Printed, RankRecord, Step
from ranklens_core.task import Result, Task
from ranklens_core.verdict import (
    VERDICT_VERSION,
    CallCounts,
    EnvironmentDifference,
    PrintedResult,
    Provenance,
    Status,
    StepResult,
    StructureResult,
    TimingResult,
    ValuesResult,
    Verdict,
)

SHOWN_ROLES = ("tp", "pp", "dp", "ep", "cp", "pipe", "model", "expert", "sp")
"""Roles of the verdict's first line, in this order; trivial groups only of the first three."""

SHOWN_VERSIONS = {"deepspeed": "deepspeed", "megatron-core": "megatron", "torch": ""}
"""Distribution -> the framework that must be in use for its version to be shown."""


def judge(
    replayer: Replayer, matcher: Matcher | None, steps: int, error: BaseException | None
) -> tuple[Status, str]:
    """Status and message. ``error`` is what ended the program, None for its own end."""
    fatal = replayer.fatal or (error if isinstance(error, RankLensError) else None)
    if isinstance(fatal, StructureMismatchError):
        return Status.STRUCTURE_MISMATCH, "" if matcher and matcher.first_mismatch else str(fatal)
    if fatal is not None:
        by_exit = {5: Status.TRACE_ENDED, 6: Status.UNSUPPORTED, 2: Status.USAGE}
        return by_exit[fatal.exit_status], str(fatal)
    if error is not None and not _is_success(error):
        return Status.PROGRAM_FAILED, f"{type(error).__name__}: {error}"
    if matcher is None:
        return Status.OK, ""
    if matcher.first_mismatch is not None:
        return Status.STRUCTURE_MISMATCH, ""
    if matcher.window_ended:
        if replayer.scores.first_divergence is not None:
            return Status.VALUES_DIVERGED, ""
        return Status.OK, f"the recorded window ends before step {steps}"
    missing = matcher.missing()
    if missing:
        return Status.STRUCTURE_MISMATCH, missing
    if replayer.scores.first_divergence is not None:
        return Status.VALUES_DIVERGED, ""
    return Status.OK, ""


def make_verdict(
    *,
    task: Task,
    lone: LoneRank,
    replayer: Replayer,
    matcher: Matcher | None,
    record: RankRecord | None,
    differences: Sequence[EnvironmentDifference],
    error: BaseException | None,
) -> Verdict:
    """The verdict of a run; ``matcher`` and ``record`` are None for an emulation."""
    status, message = judge(replayer, matcher, len(lone.steps.done), error)
    if lone.bypasses.used and status is not Status.UNSUPPORTED:
        # the program has caught the refusal and gone on without
        status, message = Status.UNSUPPORTED, f"The program tried to use {lone.bypasses.used[0]}."
    steps = _steps(lone.steps.done, record.steps if record else (), timed=task.keeps_time)
    return Verdict(
        version=VERDICT_VERSION,
        task=task.name,
        rank=lone.rank,
        world_size=lone.world_size,
        status=status,
        message=message,
        calls=CallCounts(recorded=matcher.total if matcher else 0, replayed=replayer.replayed),
        structure=StructureResult(
            matched=matcher.matched if matcher else 0,
            total=matcher.total if matcher else 0,
            training_matched=matcher.training_matched if matcher else 0,
            training_total=matcher.training_total if matcher else 0,
            first_mismatch=matcher.first_mismatch if matcher else None,
        ),
        values=ValuesResult(
            identical=replayer.scores.identical,
            compared=replayer.scores.compared,
            first_divergence=replayer.scores.first_divergence,
        ),
        provenance=Provenance(
            result={source: replayer.provenance[source] for source in Result},
            time={source: replayer.delivery.times[source] for source in TimeSource},
        ),
        steps=steps,
        timing=_timing(steps),
        environment=tuple(differences),
        # made-up results give made-up losses: comparing them would say nothing
        printed=compare_printed(
            record.printed if record and task.result is Result.RECORDED else (), lone.printed
        ),
        bypassed=tuple(lone.bypasses.used),
        roles=tuple(
            f"{group.role} {group.ranks.index(lone.rank)}/{len(group.ranks)}"
            for group in _shown_groups(record.groups if record else lone.made)
        ),
        versions=tuple(
            item
            for item in environment.versions()
            if item.name in SHOWN_VERSIONS
            and (not SHOWN_VERSIONS[item.name] or SHOWN_VERSIONS[item.name] in lone.frameworks)
        ),
    )


def compare_printed(recorded: Sequence[Printed], now: Sequence[Printed]) -> PrintedResult:
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


def _shown_groups(groups: Sequence[GroupRecord]) -> list[GroupRecord]:
    """One group a shown role, its ``role`` that one alone."""
    best: dict[str, GroupRecord] = {}
    for group in groups:
        for role in group.role.split("+"):
            if role in SHOWN_ROLES and (len(group.ranks) > 1 or role in SHOWN_ROLES[:3]):
                best.setdefault(role, msgspec.structs.replace(group, role=role))
    return sorted(best.values(), key=lambda group: SHOWN_ROLES.index(group.role))


def _steps(done: Sequence[Step], recorded: Sequence[Step], *, timed: bool) -> tuple[StepResult, ...]:
    recorded_ns = {step.index: step.end_ns - step.begin_ns for step in recorded}
    results = []
    for step in done:
        wall_ns, then_ns = step.end_ns - step.begin_ns, recorded_ns.get(step.index)
        error_pct = 100 * (wall_ns - then_ns) / then_ns if timed and then_ns else None
        results.append(
            StepResult(index=step.index, wall_ns=wall_ns, recorded_ns=then_ns, error_pct=error_pct)
        )
    return tuple(results)


def _timing(steps: Sequence[StepResult]) -> TimingResult:
    """Errors over the steps after the first, which warms up (unless it is the only one)."""
    errors = [abs(step.error_pct) for step in steps if step.error_pct is not None]
    errors = errors[1:] or errors
    if not errors:
        return TimingResult(mean_abs_error_pct=None, worst_abs_error_pct=None)
    return TimingResult(mean_abs_error_pct=sum(errors) / len(errors), worst_abs_error_pct=max(errors))


def _is_success(error: BaseException) -> bool:
    return isinstance(error, SystemExit) and error.code in (None, 0)
