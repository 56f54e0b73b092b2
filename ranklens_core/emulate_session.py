"""One rank of a job that was never recorded: made-up results, estimated times."""

from __future__ import annotations

from ranklens_core.clock import Clock, MonotonicClock, PausableClock
from ranklens_core.delivery import AtOnce, Delivery
from ranklens_core.errors import UsageError
from ranklens_core.judgement import Judged, make_verdict
from ranklens_core.lone_rank import LoneRank
from ranklens_core.network_time import NetworkTime, check_world
from ranklens_core.replayer import Replayer
from ranklens_core.step_meter import StepMeter
from ranklens_core.task import Task
from ranklens_core.timekeeper import Timekeeper
from ranklens_core.timing.estimate import Estimator
from ranklens_core.timing.network import NetworkDescription
from ranklens_core.verdict import Verdict

RANKS_PER_NODE = 8
"""Of a job whose network nobody named: the usual node has this many GPUs."""


class EmulateSession(Judged):
    """Emulates ``rank`` of ``world_size`` from creation until ``close``, which makes the ``verdict``.

    ``network`` gives the times; None keeps none. Raises UsageError for a rank outside the world, and for a
    task or a network that does not fit.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        task: Task,
        network: NetworkDescription | None,
        *,
        clock: Clock | None = None,
    ) -> None:
        if world_size < 1 or not 0 <= rank < world_size:
            raise UsageError(
                f"There is no rank {rank} in a world of {world_size}: give 0 <= --rank < --world-size."
            )
        if task.compares:
            raise UsageError(
                f"--task {task.name} compares with a recording, and an emulation has none. Record the job, "
                "or use --task profile, tune, memory or structure."
            )
        estimator = Estimator(network) if network is not None else None
        if estimator is not None:
            check_world(estimator, world_size)
        per_node = min(estimator.ranks_per_node if estimator else RANKS_PER_NODE, world_size)
        self.task = task
        self._meter = StepMeter(task)
        self._network_time: NetworkTime | None = None
        pausable = PausableClock(clock or MonotonicClock())
        self._lone = LoneRank(
            rank,
            world_size,
            local_rank=rank % per_node,
            local_world_size=per_node,
            backend=None,
            clock=pausable,
            makes_up=True,
            loads_alone=True,
            on_step_begin=self._meter.begin,
            on_step_end=self._meter.end,
        )
        try:
            lone = self._lone
            delivery: Delivery = AtOnce()
            if task.keeps_time and estimator is not None:
                self._network_time = NetworkTime(estimator, rank, lone.made)
                keeper = Timekeeper(
                    lone.patches,
                    pausable,
                    None,
                    self._network_time,
                    exact=False,
                    virtual=True,
                    groups=lone.made,
                    recorded={},
                )
                delivery, self._meter.times = keeper.delivery, keeper.times
            self._replayer = Replayer(
                None,
                None,
                task,
                lone.signatures,
                lone.sites,
                lone.steps,
                lone.made,
                lone.synthesiser,
                delivery,
            )
            if self._meter.memory is not None:
                self._meter.memory.ready()
            lone.start(self._replayer)
        except BaseException:
            self._lone.undo()
            raise

    def close(self, error: BaseException | None = None) -> Verdict:
        """Undo everything and judge; ``error`` is what ended the program, None for its own end."""
        self._replayer.delivery.close()
        self._lone.undo()
        verdict = self._verdict = make_verdict(
            task=self.task,
            lone=self._lone,
            replayer=self._replayer,
            matcher=None,
            record=None,
            differences=(),
            error=error,
            times=self._meter.times,
            memory=self._meter.memory.result(tuple(self._lone.made.values())) if self._meter.memory else None,
            estimates=self._network_time.sources if self._network_time else {},
        )
        return verdict
