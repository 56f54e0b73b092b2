"""Timelines of the whole job: under a virtual clock, or with something changed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ranklens_core.errors import UsageError
from ranklens_core.schema import Step
from ranklens_core.timing.align import join_trace
from ranklens_core.timing.binding import Binding, bind, recorded_transfers
from ranklens_core.timing.estimate import SAME_RANK, Estimate, Estimator
from ranklens_core.timing.join import Joined
from ranklens_core.timing.ranklog import Int64
from ranklens_core.timing.schedule import Compute, schedules
from ranklens_core.timing.simulate import Simulation, simulate
from ranklens_core.trace import Trace


@dataclass(frozen=True)
class RankTimeline:
    """One rank, arrays over its calls (int64, ns since the job's first rank began).

    ``start_ns`` is when the rank came to the call, ``end_ns`` when the call ended (``NO_TIME`` where
    it never did). ``steps`` are the training steps in the same clock.
    """

    rank: int
    entry: Int64
    start_ns: Int64
    end_ns: Int64
    steps: tuple[Step, ...]


@dataclass(frozen=True)
class Timeline:
    """The whole job: its ranks in order, and the simulation they came from, with who waited for whom in it.

    ``transfers`` says what the transfer times are worth: the estimates by source and how many calls
    have it; ``{"recorded": n}`` where they are the recorded ones.
    """

    ranks: tuple[RankTimeline, ...]
    simulation: Simulation
    binding: Binding
    transfers: Mapping[str, int]


def virtual_timeline(trace: Trace, estimator: Estimator, *, compute: Compute = Compute.CPU) -> Timeline:
    """The job as if each rank had its own device and the network were ``estimator``'s.

    Own compute is the ranks' own CPU time, transfers are estimated. Errors as reading the trace,
    estimating and simulating raise them.
    """
    return what_if(trace, estimator=estimator, compute=compute)


def what_if(
    trace: Trace,
    *,
    estimator: Estimator | None = None,
    compute: Compute = Compute.ELAPSED,
    compute_scale: Mapping[int, float] | None = None,
) -> Timeline:
    """The recorded job with another network or other compute.

    ``estimator`` None keeps the recorded transfers. ``compute_scale`` multiplies the own compute of
    the ranks it names. Raises UsageError for a rank that was not recorded or a scale that is not
    positive, else as reading the trace, estimating and simulating do.
    """
    joined, _ = join_trace(trace)
    binding = bind(joined)
    scales = dict(compute_scale or {})
    plans = []
    for schedule in schedules(joined, compute):
        scale = scales.pop(schedule.rank, 1.0)
        if not (scale > 0 and np.isfinite(scale)):
            raise UsageError(f"compute scale of rank {schedule.rank} must be a positive number, not {scale}")
        plans.append(schedule if scale == 1.0 else schedule.scaled(scale))
    if scales:
        known = ", ".join(str(log.rank) for log in joined.logs)
        raise UsageError(f"compute scale for ranks {sorted(scales)}, but recorded are {known}")
    if estimator is None:
        transfer_ns, sources = recorded_transfers(joined, binding), {"recorded": joined.n_exchanges}
    else:
        transfer_ns, sources = estimated_transfers(joined, estimator)
    simulation = simulate(joined, binding, plans, transfer_ns)
    return Timeline(
        ranks=tuple(_rank_timeline(simulation, place, trace) for place in range(len(joined.logs))),
        simulation=simulation,
        binding=binding,
        transfers=sources,
    )


def estimated_transfers(joined: Joined, estimator: Estimator) -> tuple[Int64, dict[str, int]]:
    """Transfer times over rows (ns, the same for all members of an exchange) by the estimator's best
    source, and how many exchanges came from each source. Raises UsageError as it does.

    The bytes of an exchange are the largest of its members': of a gather, the root has the output.
    """
    transfer_ns = np.zeros(len(joined.rank), np.int64)
    sources: dict[str, int] = {}
    known: dict[tuple[object, ...], Estimate] = {}
    in_bytes = np.maximum.reduceat(joined.in_msg_bytes[joined.members], joined.offsets[:-1]).tolist()
    out_bytes = np.maximum.reduceat(joined.out_msg_bytes[joined.members], joined.offsets[:-1]).tolist()
    of_exchange = np.zeros(joined.n_exchanges, np.int64)
    for exchange in range(joined.n_exchanges):
        op, ranks, dtype = _what_moves(joined, exchange)
        source = SAME_RANK
        if len(set(ranks)) == len(ranks):
            key = (op, ranks, in_bytes[exchange], out_bytes[exchange], dtype)
            if key not in known:
                known[key] = estimator.estimate(op, ranks, in_bytes[exchange], out_bytes[exchange], dtype)
            of_exchange[exchange], source = known[key].transfer_ns, known[key].source
        sources[source] = sources.get(source, 0) + 1
    transfer_ns[joined.members] = of_exchange[joined.exchange[joined.members]]
    return transfer_ns, sources


def _what_moves(joined: Joined, exchange: int) -> tuple[str, tuple[int, ...], str]:
    """Op, ranks and dtype of an exchange, as the estimator takes them."""
    row = int(joined.members[joined.offsets[exchange]])
    signature, log = joined.signature(row), joined.log_of(row)
    ranks = log.groups.get(signature.group, (log.rank,))
    if joined.is_message[exchange]:
        met = joined.rank[joined.members[joined.offsets[exchange] : joined.offsets[exchange + 1]]]
        peer = ranks[signature.peer] if 0 <= signature.peer < len(ranks) else log.rank
        ranks = (log.rank, int(met[-1]) if len(met) == 2 else peer)
    dtypes = signature.in_dtypes or signature.out_dtypes
    return signature.op, ranks, dtypes[0] if dtypes else "float32"


def _rank_timeline(simulation: Simulation, place: int, trace: Trace) -> RankTimeline:
    joined = simulation.joined
    log = joined.logs[place]
    unit = joined.unit[joined.rows_of(log.rank)]
    steps = tuple(
        Step(
            index=step.index,
            begin_ns=simulation.time_of(place, step.begin_ns),
            end_ns=simulation.time_of(place, step.end_ns),
        )
        for step in trace.ranks[log.rank].steps
    )
    return RankTimeline(
        rank=log.rank,
        entry=log.entry,
        start_ns=simulation.start_ns[unit],
        end_ns=simulation.end_ns[unit],
        steps=steps,
    )
