"""Rows of a job as the plain data of a diagnosis."""

from __future__ import annotations

from ranklens_core.check.structure import describe
from ranklens_core.diagnose.findings import CallState, CallView, RankEnd
from ranklens_core.diagnose.job import How, Job, RankState
from ranklens_core.timing.ranklog import NO_TIME


def call_view(job: Job, row: int) -> CallView:
    """The call in ``row``."""
    signature = job.signature(row)
    group = job.groups.get(signature.group)
    site = signature.program_site or signature.site
    failed = job.failed.get(row, "")
    ended = int(job.joined.end_ns[row]) != NO_TIME
    state = CallState.FAILED if failed else CallState.COMPLETED if ended else CallState.IN_FLIGHT
    return CallView(
        rank=int(job.joined.rank[row]),
        step=job.step(row),
        op=signature.op,
        group=signature.group,
        role=group.role if group else "",
        seq_id=job.seq_id(row),
        call=describe(signature, group),
        in_split_sizes=signature.in_split_sizes,
        out_split_sizes=signature.out_split_sizes,
        site=site,
        through=signature.site if signature.site != site else "",
        state=state,
        error=failed.splitlines()[0] if failed else "",
    )


def end_view(job: Job, state: RankState) -> RankEnd:
    """How a rank ended, with its last call."""
    calls, last = 0, None
    if state.has_log:
        rows = job.joined.rows_of(state.rank)
        calls = rows.stop - rows.start
        last = call_view(job, rows.stop - 1) if calls else None
    return RankEnd(
        rank=state.rank,
        how=str(state.how),
        exit_status=state.exit_status,
        signal=state.signal,
        error=state.error or state.text,
        place=state.place,
        calls=calls,
        last_call=last,
    )


def is_cut_off(state: RankState) -> bool:
    """Whether the rank's recording ended before its program did."""
    return state.how in (How.KILLED, How.STOPPED)
