"""Who comes late: whose arrival the others of a group wait for, from recorded times.

``lateness = last start - last but one start``, over exchanges that all members came to
(design, section 6: ``wait = max(start) - own start``).
"""

from __future__ import annotations

import numpy as np

from ranklens_core.diagnose.findings import Straggler
from ranklens_core.diagnose.job import Job
from ranklens_core.schema import NO_STEP
from ranklens_core.timing.ranklog import NO_TIME, Int64


def stragglers(job: Job, step: Int64, most: int = 3) -> tuple[Straggler, ...]:
    """The ``most`` ranks that the others waited longest for; ``step`` over rows.

    Collectives of training steps count, or all where no steps are known; the first step does not, in which
    everybody starts up.
    """
    joined = job.joined
    size = np.diff(joined.offsets)
    whole = ~joined.is_message & (size == joined.expected) & (size > 1)
    first = joined.members[joined.offsets[:-1]] if len(size) else np.zeros(0, np.int64)
    timed = whole & (joined.end_ns[first] != NO_TIME)
    steady = timed & (step[first] > max(0, NO_STEP))
    chosen = np.flatnonzero(steady if steady.any() else timed)
    if not len(chosen):
        return ()
    counts = size[chosen]
    begin = np.append(0, np.cumsum(counts))
    place = np.arange(begin[-1]) - np.repeat(begin[:-1] - joined.offsets[chosen], counts)
    rows = joined.members[place]
    start = joined.start_ns[rows]
    exchange = np.repeat(np.arange(len(chosen)), counts)
    order = np.lexsort((start, exchange))
    last, before = order[begin[1:] - 1], order[begin[1:] - 2]
    late_ns = start[last] - start[before]
    rank = joined.rank[rows[last]]
    waited = np.bincount(rank, weights=late_ns.astype(np.float64), minlength=job.world_size)
    times = np.bincount(rank, minlength=job.world_size)
    member_of = np.bincount(joined.rank[rows], minlength=job.world_size)
    span_ns = int(start.max() - start.min())
    return tuple(
        Straggler(
            rank=worst,
            last=int(times[worst]),
            exchanges=int(member_of[worst]),
            waited_ns=int(waited[worst]),
            span_ns=span_ns,
        )
        for worst in np.argsort(-waited, kind="stable")[:most].tolist()
        if waited[worst] > 0
    )
