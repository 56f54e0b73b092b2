"""What is written is what is read."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trace_samples as samples
from hypothesis import given, settings
from hypothesis import strategies as st

from ranklens_core.schema import (
    CallRecord,
    CallRow,
    CompletionRow,
    EnvironmentItem,
    GroupRecord,
    Phase,
    Printed,
    Purpose,
    Signature,
    Step,
    WaitRow,
)
from ranklens_core.trace import content_address, open_trace, verify
from ranklens_core.trace.files import open_new
from ranklens_core.trace.payload import ALIGNMENT, PayloadWriter
from ranklens_core.trace.staging import Staging

INT64 = st.integers(-(2**63), 2**63 - 1)
NATURAL = st.integers(0, 2**63 - 1)
MEMBER = st.integers(-1, len(samples.GROUP.ranks) - 1)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
ADDRESS = st.binary(min_size=16, max_size=16)
FIELD_VALUES: dict[Any, st.SearchStrategy[Any]] = {
    int: NATURAL,
    str: TEXT,
    bool: st.booleans(),
    Phase: st.sampled_from(Phase),
    Purpose: st.sampled_from(Purpose),
    tuple[bytes, ...]: st.lists(ADDRESS, max_size=3).map(tuple),
    tuple[str, ...]: st.lists(TEXT, max_size=3).map(tuple),
    tuple[int, ...]: st.lists(NATURAL, max_size=3).map(tuple),
    tuple[tuple[int, ...], ...]: st.lists(st.lists(NATURAL, max_size=3).map(tuple), max_size=3).map(tuple),
}


def records(record_type: type[msgspec.Struct], **fixed: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Records of any values that the fields' types allow, but for what can never be
    (``tests/test_plausible.py``)."""
    fields = {
        field.name: FIELD_VALUES[field.type]
        for field in msgspec.structs.fields(record_type)
        if field.name not in fixed
    }
    return st.builds(record_type, **fields, **fixed)


def one_dtype_a_shape(signature: Signature) -> Signature:
    """As every call has it; a reader takes anything else for damage."""
    inputs, outputs = len(signature.in_shapes), len(signature.out_shapes)
    return msgspec.structs.replace(
        signature, in_dtypes=("float32",) * inputs, out_dtypes=("bfloat16",) * outputs
    )


def tensors_of(signature: Signature) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Shapes of the inputs and of the outputs."""
    return signature.in_shapes, signature.out_shapes


@settings(max_examples=60)
@given(st.data())
def test_any_rows(data: st.DataObject) -> None:
    any_signature = records(Signature, group=st.just(samples.GROUP.key), peer=MEMBER, tag=INT64)
    signatures = data.draw(st.lists(any_signature.map(one_dtype_a_shape), min_size=1, max_size=4))
    entries = data.draw(st.lists(st.integers(0, 2**61), unique=True, max_size=8))
    calls, completions, waits = [], [], []
    for entry in entries:
        number = data.draw(st.integers(0, len(signatures) - 1))
        kept = [data.draw(st.sampled_from((0, len(shapes)))) for shapes in tensors_of(signatures[number])]
        inputs, outputs = (st.tuples(*[ADDRESS] * count) for count in kept)
        fixed = {"signature": st.just(number), "in_addresses": inputs}
        fixed |= {"step": st.integers(-1, 2**63 - 1), "batch": st.integers(-1, 2**63 - 1)}
        calls.append(data.draw(records(CallRow, entry=st.just(entry), **fixed)))
        if data.draw(st.booleans()):
            fixed = {"src_rank": MEMBER, "out_addresses": outputs}
            completions.append(data.draw(records(CompletionRow, entry=st.just(entry), **fixed)))
        times = st.just(data.draw(NATURAL))
        fixed = {"call": st.just(entry), "begin_ns": times, "end_ns": times}
        waits.append(data.draw(records(WaitRow, entry=st.just(entry + 2**62 + 1), **fixed)))
    flush_after = data.draw(st.sets(st.sampled_from(["signatures", "calls", "completions"])))

    with tempfile.TemporaryDirectory() as name:
        writer = samples.new_writer(Path(name))
        writer.group(samples.GROUP)
        assert [writer.signature(signature) for signature in signatures] == list(range(len(signatures)))
        if "signatures" in flush_after:
            writer.flush()
        for call in calls:
            writer.call(call)
            if "calls" in flush_after:
                writer.flush()
        for completion in completions:
            writer.completion(completion)
        if "completions" in flush_after:
            writer.flush()
        for wait in waits:
            writer.wait(wait)
        writer.close(3)

        assert writer.failure == ""
        rank = open_trace(name).rank(0)
        ends = {completion.entry: completion for completion in completions}
        assert rank.signatures == tuple(signatures)
        assert list(rank.call_records()) == [
            CallRecord(rank=0, signature=signatures[row.signature], row=row, completion=ends.get(row.entry))
            for row in sorted(calls, key=lambda row: row.entry)
        ]
        expected_waits = sorted(map(msgspec.structs.asdict, waits), key=lambda row: row["entry"])
        assert rank.waits.to_pylist() == expected_waits
        assert (rank.record.complete, rank.record.exit_status) == (True, 3)


@settings(max_examples=40)
@given(st.lists(st.binary(max_size=300), max_size=12))
def test_any_values_are_stored_once_and_aligned(values: list[bytes]) -> None:
    with tempfile.TemporaryDirectory() as name:
        writer = samples.new_writer(Path(name))
        for place, value in enumerate(values):
            assert writer.has(content_address(value)) == (value in values[:place])
            writer.store(content_address(value), memoryview(value))
            assert writer.has(content_address(value))
        writer.close(0)

        rank = open_trace(name).rank(0)
        for value in values:
            assert bytes(rank.payload(content_address(value))) == value
        assert len(list(rank.values.addresses())) == len(set(values))
        stored = sum(len(value) + -len(value) % ALIGNMENT for value in set(values))
        files = list(Path(name).glob("rank-00000/payload-*.bin"))
        assert sum(file.stat().st_size for file in files) <= stored


def test_the_journal_makes_the_rank_record(tmp_path: Path) -> None:
    samples.write_trace(tmp_path)

    record = open_trace(tmp_path).ranks[1]

    assert record.groups == (msgspec.structs.replace(samples.GROUP, role="dp"),)
    assert record.steps == (Step(index=0, begin_ns=0, end_ns=40),)
    assert record.environment == (EnvironmentItem(kind="threads", name="OMP_NUM_THREADS", value="1"),)
    assert record.printed == (Printed(name="loss", text="1.25"),)
    assert (record.rank, record.host, record.complete, record.exit_status, record.failure) == (
        1,
        "host",
        True,
        0,
        "",
    )


def test_value_window_and_header_survive(tmp_path: Path) -> None:
    samples.write_rank(tmp_path, header=samples.header(0, value_steps=(1, None), has_values=False))
    record = open_trace(tmp_path).ranks[0]
    assert (record.value_steps, record.has_values) == ((1, None), False)


def test_groups_by_role_and_by_key(tmp_path: Path) -> None:
    groups = [
        GroupRecord(key="0-1#0", pg_name="0", pg_desc="", backend="gloo", ranks=(0, 1), role="dp+tp"),
        GroupRecord(key="0#0", pg_name="1", pg_desc="", backend="gloo", ranks=(0,), role="tp"),
        GroupRecord(key="1#0", pg_name="2", pg_desc="", backend="gloo", ranks=(1,)),
    ]
    for rank in (0, 1):
        writer = samples.new_writer(tmp_path, rank)
        for group in groups:
            if rank in group.ranks:
                writer.group(group)
        writer.close(0)

    trace = open_trace(tmp_path)

    assert trace.group_records == tuple(groups)
    assert trace.groups["tp"] == (groups[0], groups[1])
    assert trace.groups["dp"] == (groups[0],)
    assert trace.groups["1#0"] == (groups[2],)
    assert set(trace.groups) == {"tp", "dp", "0-1#0", "0#0", "1#0"}


def test_calls_is_a_flat_table(tmp_path: Path) -> None:
    writer = samples.new_writer(tmp_path)
    writer.group(samples.GROUP)
    writer.signature(samples.SIGNATURE)
    writer.signature(msgspec.structs.replace(samples.SIGNATURE, op="broadcast_"))
    writer.call(samples.call(0, signature=1))
    writer.call(samples.call(1))
    writer.completion(samples.completion(1, end_ns=99))
    writer.close(0)

    table = open_trace(tmp_path).calls(0)

    columns = table.select(["entry", "op", "in_shapes", "enqueue_ns", "end_ns", "error"]).to_pylist()
    assert columns == [
        {
            "entry": 0,
            "op": "broadcast_",
            "in_shapes": [[2, 3]],
            "enqueue_ns": 0,
            "end_ns": None,
            "error": None,
        },
        {"entry": 1, "op": "allreduce_", "in_shapes": [[2, 3]], "enqueue_ns": 10, "end_ns": 99, "error": ""},
    ]
    assert len(set(table.column_names)) == len(table.column_names)


def test_streams_can_be_read_by_any_arrow_reader(tmp_path: Path) -> None:
    import pyarrow as pa

    samples.write_trace(tmp_path)
    for path in tmp_path.glob("rank-00000/*.arrows"):
        with pa.ipc.open_stream(path) as reader:
            assert reader.read_all().num_rows > 0


def test_rows_queued_out_of_order_are_read_in_entry_order(tmp_path: Path) -> None:
    writer = samples.new_writer(tmp_path)
    writer.group(samples.GROUP)
    writer.signature(samples.SIGNATURE)
    for entry in (2, 0, 1):
        writer.call(samples.call(entry))
        writer.flush()
    writer.close(0)
    assert [record.row.entry for record in open_trace(tmp_path).rank(0).call_records()] == [0, 1, 2]


def test_more_rows_than_a_flush_takes(tmp_path: Path) -> None:
    writer = samples.new_writer(tmp_path)
    writer.group(samples.GROUP)
    writer.signature(samples.SIGNATURE)
    for entry in range(10_000):
        writer.call(samples.call(entry))
    writer.close(0)
    rank = open_trace(tmp_path).rank(0)
    assert [record.row for record in rank.call_records()] == [samples.call(entry) for entry in range(10_000)]


def test_payload_files_roll(tmp_path: Path) -> None:
    writer = PayloadWriter(tmp_path, open_new, roll_at_bytes=128)
    rows = [
        writer.append(bytes([number]) * 16, Staging(0).copy(bytes([number]) * 100)) for number in range(4)
    ]
    writer.flush()
    writer.close()
    assert [(row.file, row.offset) for row in rows] == [(0, 0), (0, 128), (1, 0), (1, 128)]
    assert (tmp_path / "payload-001.bin").stat().st_size == 228


def test_an_empty_rank_is_complete(tmp_path: Path) -> None:
    samples.new_writer(tmp_path).close(None)
    with open_trace(tmp_path) as trace:
        rank = trace.rank(0)
        assert (rank.signatures, list(rank.call_records()), rank.waits.num_rows) == ((), [], 0)
        assert trace.calls(0).num_rows == 0
        assert rank.record.complete


@pytest.mark.parametrize("has_run_file", [True, False])
def test_a_whole_trace_verifies(tmp_path: Path, has_run_file: bool) -> None:
    samples.write_trace(tmp_path)
    if not has_run_file:
        (tmp_path / "run.json").unlink()
    report = verify(tmp_path)
    assert report.problems == ()
    assert report.ok
    assert (report.world_size, report.calls, report.values) == (2, 16, 16)
    assert report.value_bytes == 2 * sum(len(samples.value(entry)) for entry in range(8))


def test_values_outlive_the_closed_trace(tmp_path: Path) -> None:
    samples.write_trace(tmp_path)
    with open_trace(tmp_path) as trace:
        value = trace.rank(0).payload(content_address(samples.value(3)))
    assert value.readonly
    assert bytes(value) == samples.value(3)
