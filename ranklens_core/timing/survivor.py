"""All that a replay in time needs to know of its rank, by the clock that the trace was recorded with."""

from __future__ import annotations

from typing import NamedTuple

from ranklens_core.schema import Step
from ranklens_core.timing.align import join_trace
from ranklens_core.timing.arrival import ArrivalPlan, plan_arrivals
from ranklens_core.timing.binding import bind
from ranklens_core.timing.estimate import Estimator
from ranklens_core.timing.ranklog import RankLog
from ranklens_core.timing.virtual import is_virtual, virtual_job
from ranklens_core.trace import Trace


class ReplayTiming(NamedTuple):
    """``log`` and ``steps`` are the rank's, in one clock; ``virtual`` says that it is the virtual one, whose
    times are estimated and have nothing of RankLens' own work in them."""

    plan: ArrivalPlan
    log: RankLog
    steps: tuple[Step, ...]
    virtual: bool


def replay_timing(trace: Trace, rank: int, network: Estimator | None = None) -> ReplayTiming:
    """The times that ``rank`` is to keep; of a virtual clock, on another ``network`` if one is given.

    KeyError if it was not recorded, else as reading, planning and ``virtual_job`` raise.
    """
    if is_virtual(trace.run):
        job = virtual_job(trace, network)
        plan = plan_arrivals(job.joined, job.binding, rank)
        return ReplayTiming(plan, job.log(rank), job.steps[rank], virtual=True)
    joined, _ = join_trace(trace)
    plan = plan_arrivals(joined, bind(joined), rank)
    # of the plan durations are used, which no alignment of clocks changes: the rank's own clock will do
    return ReplayTiming(plan, RankLog.read(trace.rank(rank)), trace.ranks[rank].steps, virtual=False)
