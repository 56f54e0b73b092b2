"""How long the recorded ranks were held by their calls: for a table of replays that kept no time."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from statistics import median

from ranklens_core.timing.align import join_trace
from ranklens_core.timing.arrival import plan_arrivals
from ranklens_core.timing.binding import bind
from ranklens_core.timing.exposed import recorded_exposed
from ranklens_core.timing.ranklog import RankLog
from ranklens_core.timing.virtual import is_virtual, virtual_job
from ranklens_core.trace import open_trace


def recorded_exposed_ns(directory: Path, ranks: Collection[int]) -> Mapping[int, int]:
    """Waiting and transfer of a step, ns, the median over the steps after the first (which warms up), of
    each of ``ranks`` that has steps. Raises TraceError for a trace that cannot be read."""
    found = {}
    with open_trace(directory) as trace:
        job = virtual_job(trace) if is_virtual(trace.run) else None
        joined = job.joined if job else join_trace(trace)[0]
        binding = job.binding if job else bind(joined)
        for rank in ranks:
            log = job.log(rank) if job else RankLog.read(trace.rank(rank))
            steps = job.steps[rank] if job else trace.ranks[rank].steps
            held = recorded_exposed(log, plan_arrivals(joined, binding, rank), steps)
            times = [held[step.index].wait_ns + held[step.index].transfer_ns for step in steps]
            if times:
                found[rank] = int(median(times[1:] or times))
    return found
