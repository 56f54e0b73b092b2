"""From what a replay or an emulation saw to its ``Verdict``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from ranklens_core import environment
from ranklens_core.delivery import TimeSource
from ranklens_core.errors import RankLensError, StructureMismatchError, UsageError
from ranklens_core.lone_rank import LoneRank
from ranklens_core.matching import Matcher
from ranklens_core.replayer import Replayer
from ranklens_core.schema import GroupRecord, Printed, RankRecord, Step
from ranklens_core.step_times import StepTimes, untimed_steps
from ranklens_core.task import OnMismatch, Result, Task
from ranklens_core.verdict import (
    VERDICT_VERSION,
    CallCounts,
    EnvironmentDifference,
    MemoryResult,
    PrintedResult,
    Provenance,
    Status,
    StructureResult,
    TimingResult,
    ValuesResult,
    Verdict,
)

SHOWN_ROLES = ("tp", "pp", "dp", "ep", "cp", "pipe", "model", "expert", "sp")
"""Roles of the verdict's first line, in this order; trivial groups only of the first three."""

SHOWN_VERSIONS = {"deepspeed": "deepspeed", "megatron-core": "megatron", "torch": ""}
"""Distribution -> the framework that must be in use for its version to be shown."""


OTHER_START = (
    "a process that goes on from a checkpoint may communicate otherwise in its first step than one that "
    "has long been running: DeepSpeed ZeRO-3 fetches parameters one by one until it has seen a whole step. "
    "Record the job that goes on from the checkpoint, for a few steps, and replay that from its start."
)
"""What a mismatch in the step that a program starts with may be."""


class Judged:
    """A session that ends with a verdict."""

    _verdict: Verdict | None = None

    @property
    def verdict(self) -> Verdict:
        """What the run found out, once it is over; before, ``UsageError``."""
        if self._verdict is None:
            raise UsageError("There is no verdict yet: ask for it after the `with` block of the session.")
        return self._verdict


def judge(
    replayer: Replayer,
    matcher: Matcher | None,
    steps: int,
    error: BaseException | None,
    on_mismatch: OnMismatch = OnMismatch.STOP,
) -> tuple[Status, str]:
    """Status and message. ``error`` is what ended the program, None for its own end."""
    fatal = replayer.fatal or (error if isinstance(error, RankLensError) else None)
    if isinstance(fatal, StructureMismatchError):
        if matcher is None or matcher.first_mismatch is None:
            return Status.STRUCTURE_MISMATCH, str(fatal)
        return Status.STRUCTURE_MISMATCH, OTHER_START if matcher.from_step == replayer.step else ""
    if fatal is not None:
        by_exit = {5: Status.TRACE_ENDED, 6: Status.UNSUPPORTED, 2: Status.USAGE}
        return by_exit[fatal.exit_status], str(fatal)
    if error is not None and not _is_success(error):
        return Status.PROGRAM_FAILED, f"{type(error).__name__}: {error}{_made_up(replayer)}"
    if matcher is None:
        return Status.OK, ""
    if on_mismatch is OnMismatch.ESTIMATE:
        changed = matcher.first_mismatch is not None or matcher.missing()
        return Status.OK, "not all calls are as recorded: see what was estimated" if changed else ""
    if matcher.first_mismatch is not None:
        return Status.STRUCTURE_MISMATCH, ""
    if matcher.window_ended:
        if replayer.scores.first_divergence is not None:
            return Status.VALUES_DIVERGED, ""
        ended = f"the recorded window ends before step {(matcher.from_step or 0) + steps}"
        return Status.OK, "; ".join(filter(None, (ended, matcher.restarted())))
    missing = matcher.missing()
    if missing:
        return Status.STRUCTURE_MISMATCH, missing
    if replayer.scores.first_divergence is not None:
        return Status.VALUES_DIVERGED, ""
    return Status.OK, matcher.restarted()


def _made_up(replayer: Replayer) -> str:
    """What may be why a program failed whose results were made up."""
    if not replayer.guessed:
        return ""
    return (
        f" ({replayer.guessed[:1].upper()}{replayer.guessed[1:]} were made up: no peer was there to send "
        "them. If the "
        "program failed over them, record a small job and replay that.)"
    )


def make_verdict(
    *,
    task: Task,
    lone: LoneRank,
    replayer: Replayer,
    matcher: Matcher | None,
    record: RankRecord | None,
    differences: Sequence[EnvironmentDifference],
    error: BaseException | None,
    recorded_steps: Sequence[Step] = (),
    times: StepTimes | None = None,
    memory: MemoryResult | None = None,
    estimates: Mapping[str, int] | None = None,
    on_mismatch: OnMismatch = OnMismatch.STOP,
    clock: str = "",
) -> Verdict:
    """The verdict of a run; ``matcher`` and ``record`` are None for an emulation, ``times`` where no time
    was kept, ``memory`` where it was not watched. ``recorded_steps`` are in the clock that is kept.
    ``estimates`` counts calls by the source of their estimated time, ``clock`` is the recording's."""
    status, message = judge(replayer, matcher, len(lone.steps.done), lone.refused or error, on_mismatch)
    if lone.bypasses.used and status is not Status.UNSUPPORTED:
        # the program has caught the refusal and gone on without
        status, message = Status.UNSUPPORTED, f"The program tried to use {lone.bypasses.used[0]}."
    if times is None:
        steps, timing = untimed_steps(lone.steps.done, recorded_steps), TimingResult()
    else:
        steps = times.steps(lone.steps.done, recorded_steps)
        timing = times.timing(steps)
    return Verdict(
        version=VERDICT_VERSION,
        task=task.name,
        rank=lone.rank,
        emulated=matcher is None,
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
            why_none="" if replayer.scores.compared else why_none_compared(task, matcher, record),
        ),
        provenance=Provenance(
            result={source: replayer.provenance[source] for source in Result},
            time={source: replayer.delivery.times[source] for source in TimeSource},
            estimates=dict(estimates or {}),
            clock=clock,
        ),
        steps=steps,
        timing=timing,
        memory=memory,
        environment=tuple(differences),
        # made-up results give made-up losses: comparing them would say nothing
        printed=compare_printed(
            record.printed if record and task.result is Result.RECORDED else (),
            lone.printed,
            since=matcher.from_step if matcher else None,
        ),
        bypassed=tuple(lone.bypasses.used),
        roles=tuple(
            f"{group.role} {group.ranks.index(lone.rank)}/{len(group.ranks)}"
            for group in _shown_groups(record.groups if record else list(lone.made.values()))
        ),
        versions=tuple(
            item
            for item in environment.versions()
            if item.name in SHOWN_VERSIONS
            and (not SHOWN_VERSIONS[item.name] or SHOWN_VERSIONS[item.name] in lone.frameworks)
        ),
    )


def why_none_compared(task: Task, matcher: Matcher | None, record: RankRecord | None) -> str:
    """Why no input was compared, in words: a good verdict must not seem to say more than it does."""
    if matcher is None or record is None:
        return "nothing was recorded"
    if not task.compares:
        return f"--task {task.name} compares none"
    if task.compares_all:
        return "no call with inputs of this rank's was as recorded"
    if matcher.comparable:
        return f"the replay made none of the {matcher.comparable} calls that could have been"
    if record.value_steps is not None and matcher.training_total:
        first, end = record.value_steps
        return f"the recorded window, --steps {first}:{'' if end is None else end}, has no training call"
    if not record.steps:
        return "the program made no training step (an optimizer's step after a forward)"
    if not matcher.training_total:
        return "no call inside a training step moves floating-point numbers"
    return "the training calls have no inputs of this rank's (it only receives)"


def compare_printed(
    recorded: Sequence[Printed], now: Sequence[Printed], since: int | None = None
) -> PrintedResult:
    """Printed losses and norms against the recorded ones, text against text, in order.

    A program that started with step ``since`` did not print what was printed before. That of ``since`` itself
    is left out too where it was printed before the step's end: it may have been the step's before.
    """
    if since is not None:
        recorded = [metric for metric in recorded if metric.step > since]
        now = [metric for metric in now if metric.step > since]
    pairs = list(zip(recorded, now, strict=False))
    differing = [
        (i, then, here)
        for i, (then, here) in enumerate(pairs)
        if (then.name, then.text) != (here.name, here.text)
    ]
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


def _is_success(error: BaseException) -> bool:
    return isinstance(error, SystemExit) and error.code in (None, 0)
