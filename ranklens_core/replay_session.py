"""A replay of one recorded rank from begin to end."""

from __future__ import annotations

import os
from collections import ChainMap

from ranklens_core import environment
from ranklens_core.clock import Clock, MonotonicClock, PausableClock
from ranklens_core.delivery import AtOnce, Delivery
from ranklens_core.errors import UsageError, ValuesMissingError
from ranklens_core.in_time import InTime
from ranklens_core.judgement import Judged, make_verdict
from ranklens_core.lone_rank import LoneRank
from ranklens_core.matching import Matcher
from ranklens_core.network_time import NetworkTime, check_world
from ranklens_core.replayer import Replayer
from ranklens_core.restart import check_restart
from ranklens_core.schema import RankRecord
from ranklens_core.step_meter import StepMeter
from ranklens_core.task import OnMismatch, Result, Task
from ranklens_core.timekeeper import Timekeeper
from ranklens_core.timing.arrival import ArrivalTimer
from ranklens_core.timing.estimate import Estimator
from ranklens_core.timing.exposed import recorded_exposed
from ranklens_core.timing.network import NetworkDescription, load_network
from ranklens_core.timing.network_content import recorded_estimator
from ranklens_core.timing.survivor import replay_timing
from ranklens_core.timing.virtual import is_virtual
from ranklens_core.trace import Trace
from ranklens_core.verdict import Verdict

WARM_BYTES = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4
"""How much of a trace's values is read before a replay that keeps time: a quarter of the memory."""

ALIKE = "the recorded call it is like"
"""Source of an estimated time: peers' pace and the transfer are those of a recorded call."""


class ReplaySession(Judged):
    """Replays one rank from creation until ``close``, which makes the ``verdict``."""

    def __init__(
        self,
        trace: Trace,
        rank: int,
        task: Task,
        *,
        on_mismatch: OnMismatch | None = None,
        from_step: int | None = None,
        network: NetworkDescription | None = None,
        clock: Clock | None = None,
    ) -> None:
        """``network`` estimates the time of calls that were not recorded, and of all where the clock was
        virtual (default: the recorded network); UsageError where the task needs one and none is known.
        ``from_step`` is the step that the program starts with, from its own checkpoint."""
        self.trace, self.task = trace, task
        self._rank_trace = trace.rank(rank)
        self.record: RankRecord = self._rank_trace.record
        self._from_step = from_step
        if from_step is not None:
            check_restart(self.record, task, from_step)
        self._meter = StepMeter(task)
        self._network_time: NetworkTime | None = None
        self._on_mismatch = on_mismatch or task.on_mismatch
        if task.result is Result.RECORDED and not task.falls_back and not self.record.has_values:
            raise ValuesMissingError(
                f"Rank {rank} was recorded without values, which --task {task.name} restores. Ranks with "
                f"values: {_ranks_with_values(trace)}. Record again with --payload {rank}, or use "
                "--task structure."
            )
        groups = {group.key: group for group in self.record.groups}
        clock = PausableClock(clock or MonotonicClock())
        # before the program runs: planning a large trace takes seconds
        estimator = self._estimator(network) if task.keeps_time else None
        other = estimator if network is not None else None
        self._timing = replay_timing(trace, rank, other) if task.keeps_time else None
        if task.keeps_time and self.record.has_values:
            self._rank_trace.warm(WARM_BYTES)
        self._lone = LoneRank(
            rank,
            trace.world_size,
            local_rank=self.record.local_rank,
            local_world_size=sum(other.host == self.record.host for other in trace.ranks.values()),
            backend=self.record.groups[0].backend if self.record.groups else "",
            clock=clock,
            makes_up=(
                task.result is Result.SYNTHESISED
                or self._on_mismatch is OnMismatch.ESTIMATE
                or not self.record.has_values
                or from_step is not None
            ),
            loads_alone=from_step is not None,
            first_step=from_step or 0,
            on_step_begin=self._meter.begin,
            on_step_end=self._meter.end,
        )
        try:
            self._matcher = Matcher(
                self._rank_trace,
                groups,
                self._lone.sites,
                stops=self._on_mismatch is OnMismatch.STOP,
                from_step=from_step,
                realigns=self._on_mismatch is OnMismatch.ESTIMATE,
                keeps_window=task.result is Result.RECORDED and self._on_mismatch is not OnMismatch.ESTIMATE,
            )
            self._differences = environment.restore(self.record.environment, self._lone.patches)
            self._replayer = Replayer(
                self._rank_trace,
                self._matcher,
                task,
                self._lone.signatures,
                self._lone.sites,
                self._lone.steps,
                groups,
                self._lone.synthesiser,
                self._delivery(clock, estimator, exact=self._on_mismatch is OnMismatch.STOP),
                self._meter.memory.restored if self._meter.memory else None,
            )
            if self._meter.memory is not None:
                self._meter.memory.ready()
            self._lone.start(self._replayer)
        except BaseException:
            self._lone.undo()
            raise

    def _estimator(self, network: NetworkDescription | None) -> Estimator | None:
        """For calls without a recorded time; None where every call must be as recorded."""
        if network is None and self._on_mismatch is OnMismatch.STOP:
            return None
        if network is None and is_virtual(self.trace.run):
            return recorded_estimator(self.trace.run.network_content)
        if network is None and (self.record.groups and "nccl" not in self.record.groups[0].backend):
            network = load_network("loopback")
        if network is None:
            raise UsageError(
                f"--task {self.task.name} estimates the time of calls that are not as recorded: name the "
                "network of the job with --network, say h100-ib400 (docs/network.md)."
            )
        estimator = Estimator(network)
        check_world(estimator, self.trace.world_size)
        return estimator

    def _delivery(self, clock: PausableClock, estimator: Estimator | None, *, exact: bool) -> Delivery:
        timing = self._timing
        if timing is None:
            return AtOnce()
        groups = ChainMap(self._lone.made, {group.key: group for group in self.record.groups})
        if estimator is not None:
            self._network_time = NetworkTime(estimator, self.record.rank, groups)
        keeper = Timekeeper(
            self._lone.patches,
            clock,
            ArrivalTimer(timing.plan),
            self._network_time,
            exact=exact,
            virtual=timing.virtual,
            groups=groups,
            recorded=recorded_exposed(timing.log, timing.plan, timing.steps),
        )
        self._meter.times = keeper.times
        return keeper.delivery

    def close(self, error: BaseException | None = None) -> Verdict:
        """Undo everything and judge; ``error`` is what ended the program, None for its own end."""
        self._replayer.delivery.close()
        self._lone.undo()
        verdict = self._verdict = make_verdict(
            task=self.task,
            lone=self._lone,
            replayer=self._replayer,
            matcher=self._matcher,
            record=self.record,
            recorded_steps=self._timing.steps if self._timing else self.record.steps,
            differences=self._differences,
            error=error,
            times=self._meter.times,
            memory=self._meter.memory.result(self.record.groups) if self._meter.memory else None,
            estimates=self._estimates(),
            on_mismatch=self._on_mismatch,
            clock=self.trace.run.clock if self._timing else "",
        )
        self._rank_trace.close()
        return verdict

    def _estimates(self) -> dict[str, int]:
        """How many calls that were not recorded got their time from where."""
        sources = dict(self._network_time.sources) if self._network_time else {}
        if isinstance(self._replayer.delivery, InTime) and self._replayer.delivery.alike:
            sources[ALIKE] = self._replayer.delivery.alike
        return sources


def _ranks_with_values(trace: Trace) -> str:
    ranks = [str(rank) for rank, record in trace.ranks.items() if record.has_values]
    return ", ".join(ranks) if ranks else "none"
