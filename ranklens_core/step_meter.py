"""What is measured at each step's end, of a rank that runs alone: its times, its memory, both or neither."""

from __future__ import annotations

from ranklens_core.memory import MemoryWatch
from ranklens_core.schema import Step
from ranklens_core.step_times import StepTimes
from ranklens_core.task import Task


class StepMeter:
    """Told of steps by ``LoneRank``. ``memory`` is there where ``task`` watches it; ``times`` is set by the
    session where time is kept."""

    def __init__(self, task: Task) -> None:
        self.memory = MemoryWatch() if task.watches_memory else None
        self.times: StepTimes | None = None

    def begin(self) -> None:
        """The first step begins."""
        if self.times is not None:
            self.times.begin()
        if self.memory is not None:
            self.memory.begin()

    def end(self, step: Step) -> None:
        """``step`` is over."""
        if self.times is not None:
            self.times.end(step)
        if self.memory is not None:
            self.memory.end(step)
