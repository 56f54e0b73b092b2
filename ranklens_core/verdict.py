"""What a replay found: the JSON of ``--verdict`` and the last lines on stderr."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

import msgspec

from ranklens_core.check.structure import Mismatch
from ranklens_core.check.values import Divergence
from ranklens_core.schema import EnvironmentItem
from ranklens_core.text import printable

VERDICT_VERSION = 1

W = 20
"""Width of the first column of the verdict in words."""


class Status(StrEnum):
    """The outcome; ``EXIT_STATUS`` maps it to the command's exit status."""

    OK = "ok"
    STRUCTURE_MISMATCH = "structure-mismatch"
    VALUES_DIVERGED = "values-diverged"
    TRACE_ENDED = "trace-ended"
    TRACE_UNUSABLE = "trace-unusable"
    UNSUPPORTED = "unsupported"
    PROGRAM_FAILED = "program-failed"
    USAGE = "usage"


EXIT_STATUS = {
    Status.OK: 0,
    Status.USAGE: 2,
    Status.STRUCTURE_MISMATCH: 3,
    Status.VALUES_DIVERGED: 4,
    Status.TRACE_ENDED: 5,
    Status.TRACE_UNUSABLE: 5,
    Status.UNSUPPORTED: 6,
}
"""``PROGRAM_FAILED`` is absent: then the program's own exit status passes through."""


class CallCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Calls the trace has for this rank (inside the recorded window), calls the program made."""

    recorded: int
    replayed: int


class StructureResult(msgspec.Struct, frozen=True, kw_only=True):
    """Calls that matched of those recorded, over all and over the training calls."""

    matched: int
    total: int
    training_matched: int
    training_total: int
    first_mismatch: Mismatch | None


class ValuesResult(msgspec.Struct, frozen=True, kw_only=True):
    """Training calls whose inputs had the recorded bits, of those compared; ``why_none`` if none was."""

    identical: int
    compared: int
    first_divergence: Divergence | None
    why_none: str


class Provenance(msgspec.Struct, frozen=True, kw_only=True):
    """How many calls got their result, and their time, from where; the estimated times by their source.

    ``clock`` is the recording's, where its time was kept. With ``virtual`` the times that steps are compared
    with are the simulated job's: estimated transfers on recorded compute.
    """

    result: dict[str, int]
    time: dict[str, int]
    estimates: dict[str, int] = {}
    clock: str = ""


class StepParts(msgspec.Struct, frozen=True, kw_only=True):
    """What a step's wall time is made of, ns: the program held by its calls, while peers were missing
    (``wait_ns``) and after that (``transfer_ns``), and the rest (``compute_ns``)."""

    wait_ns: int
    transfer_ns: int
    compute_ns: int


class StepResult(msgspec.Struct, frozen=True, kw_only=True):
    """One step's wall time now and as recorded; error and parts only where time was kept."""

    index: int
    wall_ns: int
    recorded_ns: int | None
    error_pct: float | None
    parts: StepParts | None
    recorded_parts: StepParts | None


class Compared(msgspec.Struct, frozen=True, kw_only=True):
    """A time a step, median over the steps, ns; ``recorded_ns`` is None where there is no record."""

    replayed_ns: int
    recorded_ns: int | None
    error_pct: float | None


class LatenessResult(msgspec.Struct, frozen=True, kw_only=True):
    """How much after their due times results arrived, ns, over ``count`` results."""

    count: int
    p50_ns: int
    p99_ns: int
    max_ns: int


class TimingResult(msgspec.Struct, frozen=True, kw_only=True):
    """Steps after the first against the record; all None where the task keeps no time.

    Errors in percent of the recorded step. ``estimated_pct`` is the part of the exposed communication
    (wait and transfer) whose time was estimated. ``paused_ns`` is how long time stood still because the
    program was stopped in a debugger; no other time includes it.
    """

    mean_abs_error_pct: float | None = None
    worst_abs_error_pct: float | None = None
    step: Compared | None = None
    wait: Compared | None = None
    transfer: Compared | None = None
    compute: Compared | None = None
    estimated_pct: float | None = None
    lateness: LatenessResult | None = None
    paused_ns: int | None = None


class MemoryStep(msgspec.Struct, frozen=True, kw_only=True):
    """The most memory during a step."""

    index: int
    peak_bytes: int


class CommBuffers(msgspec.Struct, frozen=True, kw_only=True):
    """What the job's communication library holds besides, not measured: ``basis`` says what it rests on."""

    nbytes: int
    basis: str


class MemoryResult(msgspec.Struct, frozen=True, kw_only=True):
    """Peaks by step. ``counter`` says what is counted, ``set_up_bytes`` is the peak before the first step.

    RankLens' own part of a peak: ``own_tables_bytes`` (the trace's tables, measured) and at most
    ``own_values_bytes`` (recorded values of the call being answered). ``comm_buffers`` are not in the peaks.
    """

    counter: str
    set_up_bytes: int
    steps: tuple[MemoryStep, ...]
    own_tables_bytes: int
    own_values_bytes: int
    comm_buffers: CommBuffers


class EnvironmentDifference(msgspec.Struct, frozen=True, kw_only=True):
    """A recorded fact of the environment that was not so here; ``restored`` if it is now."""

    what: str
    recorded: str
    now: str
    restored: bool


class PrintedResult(msgspec.Struct, frozen=True, kw_only=True):
    """Losses and gradient norms the program printed: how many are as recorded, digit by digit."""

    identical: int
    compared: int
    last: dict[str, str]
    first_difference: str


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a replay found out."""

    version: int
    task: str
    rank: int
    world_size: int
    emulated: bool
    status: Status
    message: str
    calls: CallCounts
    structure: StructureResult
    values: ValuesResult
    provenance: Provenance
    steps: tuple[StepResult, ...]
    timing: TimingResult
    memory: MemoryResult | None
    environment: tuple[EnvironmentDifference, ...]
    printed: PrintedResult
    bypassed: tuple[str, ...]
    roles: tuple[str, ...]
    versions: tuple[EnvironmentItem, ...]

    def to_json(self) -> bytes:
        """Indented JSON, stable in its order."""
        return msgspec.json.format(msgspec.json.encode(self), indent=1)

    def words(self, next_commands: Sequence[str]) -> str:
        """The verdict for a person: one line a finding, then what to do next."""
        lines = [self._headline(), *self._findings()]
        lines.extend(
            f"{'next' if index == 0 else '':<{W}}{command}" for index, command in enumerate(next_commands)
        )
        return printable("\n".join(lines))

    def _headline(self) -> str:
        versions = ", ".join(f"{item.name} {item.value}" for item in self.versions)
        return "   ".join([f"rank {self.rank} of {self.world_size}", *self.roles, versions]).rstrip()

    def _findings(self) -> list[str]:
        structure, values = self.structure, self.values
        if not self.emulated:
            lines = [
                f"{'structure':<{W}}{structure.matched} of {structure.total} calls match"
                f"          training {structure.training_matched} of {structure.training_total}"
            ]
        else:
            lines = [f"{'structure':<{W}}{self.calls.replayed} calls, none recorded"]
        if structure.first_mismatch:
            lines.extend(f"{'':<{W}}{line}" for line in structure.first_mismatch.text.splitlines())
        if values.compared:
            lines.append(
                f"{'values':<{W}}{values.identical} of {values.compared} inputs identical{self._printed()}"
            )
        else:
            lines.append(f"{'values':<{W}}no input was compared: {values.why_none}{self._printed()}")
        if values.first_divergence:
            lines.extend(f"{'':<{W}}{line}" for line in values.first_divergence.text.splitlines())
        if self.printed.first_difference:
            lines.append(f"{'':<{W}}{self.printed.first_difference}")
        lines.extend(f"{'' if index else 'time':<{W}}{line}" for index, line in enumerate(self._time()))
        lines.extend(f"{'' if index else 'memory':<{W}}{line}" for index, line in enumerate(self._memory()))
        synthesised = self.provenance.result.get("synthesised", 0)
        if synthesised:
            lines.append(f"{'results':<{W}}{synthesised} synthesised, not the real job's values")
        restored = [f"{item.what}={item.recorded} ({item.now})" for item in self.environment if item.restored]
        if restored:
            lines.append(f"{'environment':<{W}}restored, with what was here: {', '.join(restored)}")
        lines.extend(
            f"{'environment':<{W}}{item.what} was {item.recorded} when recorded, is {item.now} here"
            for item in self.environment
            if not item.restored
        )
        lines.extend(f"{'bypassed':<{W}}{name}" for name in self.bypassed)
        if self.message:
            lines.append(f"{self.status.value:<{W}}{self.message}")
        return lines

    def _printed(self) -> str:
        printed = self.printed
        if not printed.compared:
            return ""
        if printed.identical == printed.compared:
            last = "   ".join(f"{name} {text}" for name, text in printed.last.items())
            return f"     {last} as recorded"
        return f"     {printed.identical} of {printed.compared} printed losses and norms as recorded"

    def _time(self) -> list[str]:
        timing = self.timing
        if timing.step is None:
            return ["not asked for" if timing.lateness is None else "no step came to its end"]
        calls = ", ".join(f"{count} {source}" for source, count in self.provenance.time.items() if count)
        steps = f"a step takes {timing.step.replayed_ns / 1e6:.1f} ms"
        virtual = self.provenance.clock == "virtual"
        if timing.mean_abs_error_pct is not None:
            steps = (
                f"steps {timing.mean_abs_error_pct:.1f}% off the {'virtual' if virtual else 'recorded'} on "
                "average, "
                f"{timing.worst_abs_error_pct:.1f}% at worst"
            )
        parts = [
            f"{name} {_against(part)}"
            for name, part in (
                ("step", timing.step),
                ("waiting", timing.wait),
                ("transfer", timing.transfer),
                ("compute", timing.compute),
            )
            if part
        ]
        recorded = f" ({'virtual' if virtual else 'recorded'})" if timing.step.recorded_ns is not None else ""
        lines = [f"{steps}     calls: {calls}", f"ms, median of each{recorded}: {', '.join(parts)}"]
        if virtual:
            lines.append("the virtual clock's times are estimated transfers on recorded compute (CPU time)")
        elif timing.estimated_pct:
            lines.append(f"{timing.estimated_pct:.0f}% of the exposed communication is estimated")
        late = timing.lateness
        if late and late.count:
            us = [f"{ns / 1e3:.0f} us" for ns in (late.p50_ns, late.p99_ns, late.max_ns)]
            lines.append(f"results late by {us[0]} (p50), {us[1]} (p99), {us[2]} (most)")
        if timing.paused_ns:
            lines.append(f"time stood still for {timing.paused_ns / 1e9:.1f} s in the debugger")
        return lines

    def _memory(self) -> list[str]:
        memory = self.memory
        if memory is None:
            return []
        set_up = f"set-up {_mib(memory.set_up_bytes)}"
        if not memory.steps:
            return [f"no step came to its end     {set_up} {memory.counter}"]
        most = max(memory.steps, key=lambda step: step.peak_bytes)
        least = min(step.peak_bytes for step in memory.steps)
        buffers = memory.comm_buffers
        own = f"{_mib(memory.own_tables_bytes)} tables, {_mib(memory.own_values_bytes)} values"
        return [
            f"peak {_mib(most.peak_bytes)} {memory.counter}, in step {most.index}     "
            f"least of a step {_mib(least)}, {set_up}",
            f"RankLens' own in it at most: {own}",
            f"communication buffers not in it: {_mib(buffers.nbytes)} ({buffers.basis})",
        ]


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:.1f} MiB"


def _against(part: Compared) -> str:
    """Milliseconds, ``12.3 (12.0)`` with the recorded ones."""
    now = f"{part.replayed_ns / 1e6:.1f}"
    return now if part.recorded_ns is None else f"{now} ({part.recorded_ns / 1e6:.1f})"
