"""What a trace says of a rank that hangs, fails or is killed: signs of life, its error, its launcher."""

from __future__ import annotations

from pathlib import Path

import pytest
from trace_samples import GROUP, RUN, SIGNATURE, call, completion, header

from ranklens_core.clock import ManualClock
from ranklens_core.errors import TraceDamagedError
from ranklens_core.trace import JobEnding, TraceWriter, open_trace, read_ending, write_ending
from ranklens_core.trace.layout import ENDING_FILE
from ranklens_core.trace.lines import AliveLine
from ranklens_core.trace.writer import ALIVE_INTERVAL_NS


def started(directory: Path, clock: ManualClock) -> TraceWriter:
    """A rank that has a group and a signature."""
    writer = TraceWriter(directory, RUN, header(0), clock=clock)
    writer.group(GROUP)
    writer.signature(SIGNATURE)
    return writer


def test_signs_of_life_come_only_while_nothing_is_recorded(tmp_path: Path) -> None:
    clock = ManualClock(1)
    writer = started(tmp_path, clock)
    writer.watch(lambda: ((0,), "train.py:3 main"))
    writer.call(call(0))
    writer.flush()
    with open_trace(tmp_path) as trace:
        assert trace.journal(0).alive is None
    clock.advance(ALIVE_INTERVAL_NS)
    writer.flush()
    with open_trace(tmp_path) as trace:
        journal = trace.journal(0)
        assert journal.alive == AliveLine(
            time_ns=1 + ALIVE_INTERVAL_NS, waiting=(0,), place="train.py:3 main"
        )
        assert journal.time_ns == 1 + ALIVE_INTERVAL_NS
    writer.completion(completion(0))
    writer.flush()
    with open_trace(tmp_path) as trace:
        assert trace.journal(0).alive is None
    writer.close(0)


def test_no_sign_of_life_without_somebody_to_ask(tmp_path: Path) -> None:
    clock = ManualClock(1)
    writer = started(tmp_path, clock)
    writer.flush()
    clock.advance(10 * ALIVE_INTERVAL_NS)
    writer.flush()
    with open_trace(tmp_path) as trace:
        assert trace.journal(0).alive is None
    writer.close(0)


def test_a_new_kind_of_call_is_on_disk_before_it_is_made(tmp_path: Path) -> None:
    writer = started(tmp_path, ManualClock(1))
    writer.call(call(0), is_new=True)
    writer.call(call(1))
    with open_trace(tmp_path) as trace:
        assert trace.rank(0).calls["entry"].to_pylist() == [0]
    writer.close(0)


def test_the_error_that_a_program_ended_with(tmp_path: Path) -> None:
    writer = started(tmp_path, ManualClock(1))
    writer.close(1, "ValueError: no label", "train.py:9 load")
    with open_trace(tmp_path) as trace:
        record = trace.ranks[0]
        assert (record.exit_status, record.error, record.error_site) == (
            1,
            "ValueError: no label",
            "train.py:9 load",
        )


def test_how_the_launcher_saw_a_job_end(tmp_path: Path) -> None:
    started(tmp_path, ManualClock(1)).close(0)
    with open_trace(tmp_path) as trace:
        assert read_ending(trace.files) is None
        ending = JobEnding(first_failure=0, status=137, signal=9, interrupted_by=0)
        write_ending(tmp_path, ending)
        assert read_ending(trace.files) == ending
        (tmp_path / ENDING_FILE).write_bytes(b'{"first_failure": "x"}')
        with pytest.raises(TraceDamagedError, match=r"ending\.json"):
            read_ending(trace.files)
