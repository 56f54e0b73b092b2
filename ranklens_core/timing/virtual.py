"""The virtual clock: a recorded job in the time it would have taken with a device for each rank.

Ranks that shared cores while they were recorded have meaningless recorded times. What means something is
each rank's own compute and who waits for whom. From these and a network the simulator makes the
job's timeline; here it takes the place of the recorded times, so that arrivals, exposed communication
and everything else that reads recorded times reads these.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from ranklens_core.errors import TraceError
from ranklens_core.schema import RunRecord, Step
from ranklens_core.timing.binding import Binding, bound_at
from ranklens_core.timing.estimate import Estimator
from ranklens_core.timing.join import Joined
from ranklens_core.timing.network_content import recorded_estimator
from ranklens_core.timing.ranklog import NO_TIME, RankLog
from ranklens_core.timing.simulate import Simulation
from ranklens_core.timing.timeline import Timeline, virtual_timeline
from ranklens_core.trace import Trace


class ClockKind(StrEnum):
    """``RunRecord.clock``."""

    WALL = "wall"
    VIRTUAL = "virtual"


def is_virtual(run: RunRecord) -> bool:
    """Whether the run's times are to be computed."""
    return run.clock == ClockKind.VIRTUAL


@dataclass(frozen=True)
class VirtualJob:
    """All ranks in virtual time: ``joined`` and ``binding`` as ``join_trace`` and ``bind`` give them for
    recorded time, and the ``timeline`` that they are made from (ns since the job began)."""

    joined: Joined
    binding: Binding
    timeline: Timeline

    @property
    def steps(self) -> Mapping[int, tuple[Step, ...]]:
        """Every rank's training steps."""
        return {rank.rank: rank.steps for rank in self.timeline.ranks}

    def log(self, rank: int) -> RankLog:
        """The log of ``rank``; KeyError if it was not recorded."""
        for log in self.joined.logs:
            if log.rank == rank:
                return log
        raise KeyError(rank)


def virtual_job(trace: Trace, estimator: Estimator | None = None) -> VirtualJob:
    """The timeline of a trace recorded with a virtual clock; ``estimator`` is another network than recorded.

    Own compute is the CPU time of the threads that communicate, with RankLens' own work left out. It counts
    for a rank with a core of its own too: its wall time would have in it whatever else ran on that core,
    and waits that are no calls (for the store, in set-up) as if they were compute.

    Raises TraceError for calls on devices other than the CPU, TraceDamagedError for a network
    that is none, else as reading and simulating do.
    """
    timeline = virtual_timeline(trace, estimator or recorded_estimator(trace.run.network_content))
    joined = timeline.simulation.joined
    _check_devices(joined)
    in_time = in_virtual_time(timeline.simulation)
    return VirtualJob(in_time, bound_at(in_time, timeline.binding), timeline)


def in_virtual_time(simulation: Simulation) -> Joined:
    """The simulated job as it would have been recorded, RankLens' own work taking no time."""
    joined = simulation.joined
    logs = tuple(_log_at(simulation, place) for place in range(len(joined.logs)))
    return dataclasses.replace(joined, logs=logs)


def _log_at(simulation: Simulation, place: int) -> RankLog:
    joined, log = simulation.joined, simulation.joined.logs[place]
    unit = joined.unit[joined.rows_of(log.rank)]
    start, end = simulation.start_ns[unit], simulation.end_ns[unit]
    end = np.where(log.end_ns == NO_TIME, NO_TIME, end)
    schedule = simulation.schedules[place]
    is_wait = np.isin(schedule.entry, log.wait_entry, assume_unique=True)
    return dataclasses.replace(
        log,
        enqueue_ns=start,
        start_ns=start,
        end_ns=end,
        return_ns=np.where(log.blocking, end, NO_TIME),
        wait_begin_ns=simulation.begin_ns[place][is_wait],
        wait_end_ns=simulation.release_ns[place][is_wait],
    )


def _check_devices(joined: Joined) -> None:
    for log in joined.logs:
        for signature in log.signatures:
            if signature.device != "cpu":
                raise TraceError(
                    f"rank {log.rank} communicated on {signature.device}: the virtual clock counts CPU time, "
                    "which says nothing of what a GPU computes. Record with --clock wall."
                )
