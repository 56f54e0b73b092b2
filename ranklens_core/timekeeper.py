"""Keeps the job's time for one rank: engine, delivery, the debugger's pauses and the steps' parts."""

from __future__ import annotations

from collections.abc import Mapping

from ranklens_core.clock import PausableClock
from ranklens_core.completion.cpu import CpuEngine, tighten_timers
from ranklens_core.debugger import pause_at_prompts
from ranklens_core.in_time import InTime, Transfer
from ranklens_core.patches import Patches
from ranklens_core.schema import GroupRecord
from ranklens_core.step_times import StepTimes
from ranklens_core.timing.arrival import ArrivalTimer
from ranklens_core.timing.exposed import Exposed


class Timekeeper:
    """``delivery`` for the replayer, ``times`` for the verdict. Undone with ``patches``.

    Parameters as ``InTime``'s; ``recorded`` is the exposed communication of each recorded step.
    """

    def __init__(
        self,
        patches: Patches,
        clock: PausableClock,
        timer: ArrivalTimer | None,
        transfer: Transfer | None,
        *,
        exact: bool,
        virtual: bool = False,
        groups: Mapping[str, GroupRecord],
        recorded: Mapping[int, Exposed],
    ) -> None:
        tighten_timers()
        engine = CpuEngine(clock)
        patches.on_undo(engine.close)

        def pause() -> None:
            clock.pause()
            engine.pause()

        def resume() -> None:
            clock.resume()
            engine.resume()

        pause_at_prompts(patches, pause, resume)
        self.delivery = InTime(engine, clock, timer, transfer, exact=exact, virtual=virtual, groups=groups)
        self.times = StepTimes(self.delivery.exposed, recorded, engine.lateness, lambda: clock.lost_ns)
