"""A RankLens trace as a ``Job``; it may be of a job that hung, broke or was killed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ranklens_core.diagnose.job import Fingerprints, How, Job, RankState, UInt64
from ranklens_core.errors import TraceError, TraceIncompleteError
from ranklens_core.rank_failure import is_peer_loss_text
from ranklens_core.schema import ADDRESS_BYTES, RankRecord
from ranklens_core.timing.align import ClockAlignment, align
from ranklens_core.timing.join import join
from ranklens_core.timing.ranklog import RankLog
from ranklens_core.trace import JobEnding, RankTrace, Trace, read_ending

INTERRUPT = "KeyboardInterrupt"

_MIX = 0x9E3779B97F4A7C15
"""Odd (2^64 over the golden ratio): tells the same addresses in another order apart."""


def read_recording(trace: Trace) -> Job:
    """Everything in ``trace`` that can be read; ranks that cannot say so in their state.

    Raises:
        TraceDamagedError: the ranks' logs contradict each other.
        TraceError: no rank at all can be read; the first one's error.
    """
    first_error: TraceError | None = None
    ending = read_ending(trace.files)
    logs, states, failed, values = [], {}, {}, {}
    records: dict[int, RankRecord] = {}
    for rank in range(trace.world_size):
        try:
            recording = trace.rank(rank)
            log = RankLog.read(recording)
            failed[rank] = _failures(recording, log)
            if recording.record.has_values:
                values[rank] = _fingerprints(recording, log)
            states[rank] = _state(recording, log, ending)
        except TraceIncompleteError as error:
            first_error = first_error or error
            states[rank] = RankState(rank, How.UNRECORDED, text=str(error))
        except TraceError as error:
            first_error = first_error or error
            states[rank] = RankState(rank, How.UNREADABLE, text=str(error))
        else:
            logs.append(log)
            records[rank] = recording.record
            recording.close()
    if first_error is not None and not logs:
        raise first_error
    joined = join(logs)
    alignment = align(joined, records)
    if not alignment.is_identity:
        joined = join(alignment.apply(logs))
    first = {log.rank: joined.rows_of(log.rank).start for log in joined.logs}
    return Job(
        source="ranklens",
        world_size=trace.world_size,
        joined=joined,
        states={rank: _in_one_clock(state, alignment) for rank, state in states.items()},
        groups={group.key: group for record in records.values() for group in record.groups},
        failed={first[rank] + at: text for rank in first for at, text in failed[rank].items()},
        values={rank: values[rank] for rank in values if rank in first},
        times=_times(trace, alignment),
        notes=_notes(ending),
    )


def _state(recording: RankTrace, log: RankLog, ending: JobEnding | None) -> RankState:
    record, alive = recording.record, recording.journal.alive
    signal = 0
    if ending is not None and ending.first_failure == record.rank:
        signal = ending.signal
    interrupted = record.error.startswith(INTERRUPT)
    if record.failure:
        how = How.STOPPED
    elif not record.complete or interrupted:
        how = How.KILLED
    else:
        how = How.FAILED if record.exit_status else How.FINISHED
    waiting: Sequence[int] = alive.waiting if alive is not None else ()
    name, _, message = record.error.partition(": ")
    return RankState(
        rank=record.rank,
        how=how,
        alive_ns=None if how in (How.FAILED, How.FINISHED) else recording.journal.time_ns,
        exit_status=None if interrupted else record.exit_status,
        error="" if interrupted else record.error,
        error_site=record.error_site,
        peer_lost=is_peer_loss_text(name, message),
        signal=signal if how is How.KILLED else 0,
        waiting=tuple(int(at) for at in np.flatnonzero(np.isin(log.entry, waiting))),
        place=record.error_site or (alive.place if alive is not None else ""),
        text=record.failure,
    )


def _in_one_clock(state: RankState, alignment: ClockAlignment) -> RankState:
    if state.alive_ns is None or alignment.is_identity:
        return state
    converted = alignment.clock_of(state.rank).convert(np.array([state.alive_ns], np.int64))
    return RankState(**{**vars(state), "alive_ns": int(converted[0])})


def _failures(recording: RankTrace, log: RankLog) -> Mapping[int, str]:
    """Error text by index of the call."""
    completions = recording.completions
    failed = completions.filter(pc.not_equal(completions["error"], ""))
    places = np.searchsorted(log.entry, failed["entry"].to_numpy())
    return dict(zip(places.tolist(), failed["error"].to_pylist(), strict=True))


def _fingerprints(recording: RankTrace, log: RankLog) -> Fingerprints:
    completions = recording.completions
    outputs = np.zeros(len(log.entry), np.uint64)
    places = np.searchsorted(log.entry, completions["entry"].to_numpy())
    outputs[places] = _of_addresses(completions["out_addresses"])
    return Fingerprints(_of_addresses(recording.calls["in_addresses"]), outputs)


def _of_addresses(column: pa.ChunkedArray) -> UInt64:
    """One number for each row's list of addresses, 0 for an empty one."""
    found = [np.zeros(0, np.uint64)]
    for chunk in column.chunks:
        length = pc.list_value_length(chunk).to_numpy(zero_copy_only=False).astype(np.int64)
        addresses = chunk.flatten()
        data = np.frombuffer(addresses.buffers()[1] or b"", np.uint64)
        begin = addresses.offset * ADDRESS_BYTES // 8
        words = data[begin : begin + 2 * len(addresses)].reshape(-1, 2)
        start = np.append(0, np.cumsum(length))
        place = np.arange(len(words)) - np.repeat(start[:-1], length)
        mixed = (words[:, 0] ^ (words[:, 1] << np.uint64(1))) * (
            np.uint64(_MIX) * (2 * place.astype(np.uint64) + np.uint64(1))
        )
        total = np.append(np.uint64(0), np.cumsum(mixed, dtype=np.uint64))
        row = total[start[1:]] - total[start[:-1]]
        found.append(np.where((length > 0) & (row == 0), np.uint64(1), row))
    return np.concatenate(found)


def _times(trace: Trace, alignment: ClockAlignment) -> str:
    if trace.run.clock != "wall":
        return f"{trace.run.clock} clock, computed after the run"
    if alignment.is_identity:
        return "recorded, one host's clock"
    if alignment.error_ns is None:
        return "recorded, hosts aligned by their wall clocks only"
    return f"recorded, hosts' clocks aligned to about {alignment.error_ns / 1000:.0f} us"


def _notes(ending: JobEnding | None) -> tuple[str, ...]:
    if ending is None or not ending.interrupted_by:
        return ()
    return (f"the job was ended from outside by signal {ending.interrupted_by}",)
