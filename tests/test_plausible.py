"""A trace with right checksums and impossible content: the error names the file and the record."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from conftest import RunCli
from trace_samples import GROUP, RUN, SIGNATURE, call, completion, header, new_writer, value, write_trace

from ranklens_core.errors import TraceDamagedError
from ranklens_core.schema import NO_PEER, GroupRecord, Signature, Step, WaitRow
from ranklens_core.trace import (
    ProblemKind,
    TraceWriter,
    content_address,
    open_trace,
    verify,
    write_run,
)

ADDRESS = content_address(value(0))
RECEIVE = {"op": "recv_any_source", "peer": NO_PEER, "in_dtypes": (), "in_shapes": (), "reduce_op": ""}


def wait(**changes: Any) -> WaitRow:
    row = WaitRow(entry=3, call=0, begin_ns=90, end_ns=91, compute_ns=3, compute_cpu_ns=2)
    return msgspec.structs.replace(row, **changes)


def write(
    directory: Path,
    *,
    group: GroupRecord = GROUP,
    signature: Signature = SIGNATURE,
    row: dict[str, Any] | None = None,
    end: dict[str, Any] | None = None,
    waited: dict[str, Any] | None = None,
    steps: tuple[Step, ...] = (),
    window: tuple[int, int | None] | None = None,
) -> Path:
    """A rank of three calls; the second and its end, or the wait for it, as the test wants them."""
    write_run(directory, RUN)
    writer = new_writer(directory, header=header(0, value_steps=window))
    writer.group(group)
    for step in steps:
        writer.step(step)
    writer.signature(signature)
    writer.store(ADDRESS, value(0))
    for entry in range(3):
        writer.call(call(entry, **(row or {} if entry == 1 else {})))
        source = 0 if signature.op == "recv_any_source" else NO_PEER
        ended = completion(entry, src_rank=source)
        if entry == 1:
            ended = msgspec.structs.replace(ended, **(end or {}))
        writer.completion(ended)
    writer.wait(wait(**(waited or {})))
    writer.close(0)
    assert writer.failure == ""
    return directory


def signature(**changes: Any) -> Signature:
    return msgspec.structs.replace(SIGNATURE, **changes)


@pytest.mark.parametrize(
    ("changes", "file", "says"),
    [
        ({"group": msgspec.structs.replace(GROUP, ranks=(0, 0))}, "journal.jsonl", "0-1#0 has a rank twice"),
        (
            {"group": msgspec.structs.replace(GROUP, ranks=(0, 2))},
            "journal.jsonl",
            "group 0-1#0 has rank 2 in a world of 2",
        ),
        ({"steps": (Step(index=0, begin_ns=5, end_ns=4),)}, "journal.jsonl", "step 0 ends before it begins"),
        ({"steps": (Step(index=-1, begin_ns=0, end_ns=4),)}, "journal.jsonl", "step -1 follows step -1"),
        (
            {"steps": (Step(index=3, begin_ns=0, end_ns=4), Step(index=2, begin_ns=4, end_ns=5))},
            "journal.jsonl",
            "step 2 follows step 3",
        ),
        ({"window": (-2, None)}, "journal.jsonl", "values of the steps -2:None"),
        ({"window": (3, 3)}, "journal.jsonl", "values of the steps 3:3"),
        (
            {"signature": signature(in_shapes=((2, -3),))},
            "signatures.arrows",
            r"signature 0 has a tensor of shape \(2, -3\)",
        ),
        (
            {"signature": signature(out_split_sizes=(4, -1))},
            "signatures.arrows",
            r"signature 0 has out_split_sizes \(4, -1\)",
        ),
        ({"signature": signature(in_msg_bytes=-24)}, "signatures.arrows", "signature 0 moves -24 bytes"),
        ({"signature": signature(peer=-2)}, "signatures.arrows", "signature 0 has peer -2 in a group of 2"),
        (
            {"signature": signature(group="0-9")},
            "signatures.arrows",
            "signature 0 is of the group '0-9', which this rank never made",
        ),
        ({"row": {"signature": 1}}, "calls.arrows", "entry 1 has signature 1 of 1"),
        ({"row": {"signature": -1}}, "calls.arrows", "entry 1 has signature -1 of 1"),
        ({"row": {"seq_id": -4}}, "calls.arrows", "entry 1 has seq_id -4"),
        ({"row": {"step": -2}}, "calls.arrows", "entry 1 has step -2"),
        ({"row": {"batch": -2}}, "calls.arrows", "entry 1 has batch -2"),
        ({"row": {"compute_ns": -1}}, "calls.arrows", "entry 1 has compute_ns -1"),
        ({"row": {"in_addresses": (ADDRESS,) * 2}}, "calls.arrows", "entry 1 has 2 addresses for 1 inputs"),
        ({"end": {"entry": 7}}, "completions.arrows", "entry 7 ended, but was never issued"),
        ({"end": {"end_ns": -7}}, "completions.arrows", "entry 1 has end_ns -7"),
        (
            {"end": {"out_addresses": (ADDRESS,) * 3}},
            "completions.arrows",
            "entry 1 has 3 addresses for 1 outputs",
        ),
        ({"end": {"src_rank": 999}}, "completions.arrows", "entry 1 came from rank 999 in a group of 2"),
        (
            {"signature": signature(**RECEIVE), "end": {"src_rank": 2}},
            "completions.arrows",
            "entry 1 came from rank 2 in a group of 2",
        ),
        (
            {"signature": signature(**RECEIVE), "end": {"src_rank": NO_PEER}},
            "completions.arrows",
            "entry 1 came from rank -1 in a group of 2",
        ),
        ({"waited": {"call": 7}}, "waits.arrows", "entry 3 waits for entry 7, which is no call before it"),
        ({"waited": {"call": -1}}, "waits.arrows", "entry 3 waits for entry -1, which is no call before it"),
        ({"waited": {"end_ns": 89}}, "waits.arrows", "entry 3 ends before it begins"),
    ],
)
def test_what_cannot_be_is_damage(changes: dict[str, Any], file: str, says: str, tmp_path: Path) -> None:
    write(tmp_path, **changes)
    with pytest.raises(TraceDamagedError, match=rf"rank-00000/{file} is damaged: .*{says}") as caught:
        read(tmp_path)
    assert caught.value.exit_status == 5
    problems = [problem for problem in verify(tmp_path).problems if problem.rank == 0]
    assert [problem.kind for problem in problems] == [ProblemKind.DAMAGED]


def read(directory: Path) -> None:
    rank = open_trace(directory).rank(0)
    assert len(list(rank.call_records())) == 3
    assert rank.waits.num_rows == 1


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"signature": signature(**RECEIVE)},
        {"signature": signature(**RECEIVE), "end": {"src_rank": 1, "out_addresses": (ADDRESS,)}},
        {"signature": signature(**RECEIVE), "end": {"src_rank": NO_PEER, "error": "RuntimeError: lost"}},
        {"signature": signature(in_shapes=((0,),), peer=1), "window": (0, None)},
        {"steps": (Step(index=0, begin_ns=4, end_ns=4), Step(index=5, begin_ns=4, end_ns=9))},
    ],
)
def test_what_can_be_is_none(changes: dict[str, Any], tmp_path: Path) -> None:
    read(write(tmp_path, **changes))


PROGRAM = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
print("from", dist.recv(torch.zeros(6)), flush=True)
"""


def test_a_sender_that_does_not_exist_never_reaches_the_program(run_cli: RunCli, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    data = bytes(24)
    for source in (1, 999):
        trace = tmp_path / f"from-{source}"
        writer = TraceWriter(trace, RUN, header(0))
        writer.group(msgspec.structs.replace(GROUP, key="0,1"))
        changes = {**RECEIVE, "group": "0,1", "in_msg_bytes": 0, "out_shapes": ((6,),)}
        writer.signature(signature(**changes))
        writer.call(call(0))
        writer.store(content_address(data), data)
        writer.completion(completion(0, src_rank=source, out_addresses=(content_address(data),)))
        writer.close(0)
    good, bad = (
        run_cli("replay", f"from-{source}", "--rank", "0", "--", "program.py") for source in (1, 999)
    )
    assert (good.returncode, good.stdout) == (0, "from 1\n"), good.stderr
    assert (bad.returncode, bad.stdout) == (5, "")
    assert "entry 0 came from rank 999 in a group of 2" in bad.stderr


def directory_instead(path: Path) -> None:
    path.unlink()
    path.mkdir()


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[0] ^= 1
    path.unlink()
    path.write_bytes(bytes(data))


def test_verify_lists_every_problem_of_every_rank(run_cli: RunCli, tmp_path: Path) -> None:
    """It used to stop at the first file that could not be read."""
    trace = write_trace(tmp_path / "trace", world_size=6)
    faults: list[tuple[str, Callable[[Path], None], str]] = [
        ("run.json", directory_instead, "unreadable: run.json"),
        ("rank-00000/journal.jsonl", directory_instead, "unreadable: rank-00000/journal.jsonl"),
        ("rank-00001/calls.arrows", directory_instead, "unreadable: rank-00001/calls.arrows"),
        ("rank-00001/waits.arrows", flip, "damaged: rank-00001/waits.arrows"),
        ("rank-00001/payload-000.bin", directory_instead, "unreadable: rank-00001"),
        ("rank-00002/values.arrows", directory_instead, "unreadable: rank-00002/values.arrows"),
        ("rank-00003/payload-000.bin", flip, "damaged: rank-00003"),
        ("rank-00004", shutil.rmtree, "missing-rank: rank-00004/journal.jsonl"),
    ]
    for name, damage, _ in faults:
        damage(trace / name)
    result = run_cli("verify", "trace")
    assert result.returncode == 5
    lines = result.stdout.splitlines()
    assert [line[: len(says)] for line, (_, _, says) in zip(lines, faults, strict=True)] == [
        says for _, _, says in faults
    ]
    assert "trace: 8 problems" in result.stderr
