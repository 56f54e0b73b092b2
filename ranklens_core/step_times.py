"""What each step of a replay took, and what of it was waiting, transfer and compute, against the record."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import median

from ranklens_core.completion.cpu import Lateness
from ranklens_core.schema import Step
from ranklens_core.timing.exposed import Exposed, ExposedMeter
from ranklens_core.verdict import Compared, LatenessResult, StepParts, StepResult, TimingResult


class StepTimes:
    """Collects the exposed communication of each step while a replay that keeps time runs.

    ``recorded`` is that of the recorded steps (empty where nothing was recorded), ``lateness`` tells how
    late the engine delivered, ``paused_ns`` how long a debugger has stopped the program.
    """

    def __init__(
        self,
        meter: ExposedMeter,
        recorded: Mapping[int, Exposed],
        lateness: Callable[[], Lateness],
        paused_ns: Callable[[], int],
    ) -> None:
        self._meter = meter
        self._recorded = recorded
        self._lateness = lateness
        self._paused_ns = paused_ns
        self._replayed: dict[int, Exposed] = {}

    def begin(self) -> None:
        """The first step begins: what came before belongs to none."""
        self._meter.take()

    def end(self, step: Step) -> None:
        """``step`` is over."""
        self._replayed[step.index] = self._meter.take()

    def steps(self, done: Sequence[Step], recorded: Sequence[Step]) -> tuple[StepResult, ...]:
        """The steps that were replayed, with their parts, against those recorded."""
        then = {step.index: step for step in recorded}
        return tuple(
            _result(
                step,
                then.get(step.index),
                error=True,
                parts=_parts(step, self._replayed.get(step.index)),
                recorded_parts=_parts(then.get(step.index), self._recorded.get(step.index)),
            )
            for step in done
        )

    def timing(self, steps: Sequence[StepResult]) -> TimingResult:
        """Over ``steps`` after the first, which warms up (unless it is the only one)."""
        steady = steps[1:] or steps
        errors = [abs(step.error_pct) for step in steady if step.error_pct is not None]
        held = [self._replayed.get(step.index, Exposed()) for step in steady]
        held_ns = sum(one.wait_ns + one.transfer_ns for one in held)
        late = self._lateness()
        return TimingResult(
            mean_abs_error_pct=sum(errors) / len(errors) if errors else None,
            worst_abs_error_pct=max(errors, default=None),
            step=_compared([step.wall_ns for step in steady], [step.recorded_ns for step in steady]),
            wait=self._part(steady, "wait_ns"),
            transfer=self._part(steady, "transfer_ns"),
            compute=self._part(steady, "compute_ns"),
            estimated_pct=100 * sum(one.estimated_ns for one in held) / held_ns if held_ns else 0.0,
            lateness=LatenessResult(
                count=late.count, p50_ns=late.p50_ns, p99_ns=late.p99_ns, max_ns=late.max_ns
            ),
            paused_ns=self._paused_ns(),
        )

    def _part(self, steady: Sequence[StepResult], name: str) -> Compared | None:
        return _compared(
            [getattr(step.parts, name) for step in steady if step.parts],
            [getattr(step.recorded_parts, name) for step in steady if step.recorded_parts],
        )


def untimed_steps(done: Sequence[Step], recorded: Sequence[Step]) -> tuple[StepResult, ...]:
    """The steps of a replay that kept no time: their wall times mean nothing for the job."""
    then = {step.index: step for step in recorded}
    return tuple(
        _result(step, then.get(step.index), error=False, parts=None, recorded_parts=None) for step in done
    )


def _result(
    step: Step, then: Step | None, *, error: bool, parts: StepParts | None, recorded_parts: StepParts | None
) -> StepResult:
    wall_ns = step.end_ns - step.begin_ns
    then_ns = then.end_ns - then.begin_ns if then else None
    return StepResult(
        index=step.index,
        wall_ns=wall_ns,
        recorded_ns=then_ns,
        error_pct=_error_pct(wall_ns, then_ns) if error else None,
        parts=parts,
        recorded_parts=recorded_parts,
    )


def _parts(step: Step | None, exposed: Exposed | None) -> StepParts | None:
    if step is None or exposed is None:
        return None
    held_ns = exposed.wait_ns + exposed.transfer_ns
    return StepParts(
        wait_ns=exposed.wait_ns,
        transfer_ns=exposed.transfer_ns,
        compute_ns=step.end_ns - step.begin_ns - held_ns,
    )


def _compared(now: Sequence[int], then: Sequence[int | None]) -> Compared | None:
    """Medians; None where nothing was replayed."""
    if not now:
        return None
    known = [value for value in then if value is not None]
    now_ns, then_ns = round(median(now)), round(median(known)) if known else None
    return Compared(replayed_ns=now_ns, recorded_ns=then_ns, error_pct=_error_pct(now_ns, then_ns))


def _error_pct(now_ns: int, then_ns: int | None) -> float | None:
    return 100 * (now_ns - then_ns) / then_ns if then_ns else None
