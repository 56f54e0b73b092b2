"""Every c10d operator, on real gloo ranks: recorded, then each rank replayed alone, bit for bit.

Each program of ``tests/programs`` runs plainly, recorded and replayed, and says what it sees. All
three must say the same; of handles (lines with ``handle:``) only the last two, because gloo's own
differ in what they offer.
"""

from __future__ import annotations

import gc
import json
import logging
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ranklens_core.c10d.ops import operators
from ranklens_core.cluster import run_local
from ranklens_core.program import Program
from ranklens_core.session import record, replay
from ranklens_core.trace import open_trace

PROGRAMS_DIR = Path(__file__).parent / "programs"
PROGRAMS = {
    "every_op": 4,
    "p2p": 4,
    "groups": 4,
    "objects": 4,
    "tensors": 4,
    "functional": 4,
    "reducer": 4,
    "failures": 2,
}
"""Program and number of ranks."""

TRAINING = ("fsdp2", "dtensor")
"""Programs that train and print losses, on 4 ranks."""

SLOW_IMPORTS = ("torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor.parallel")
"""What torch imports when it is first needed; once here instead of once in each rank."""

Lines = dict[int, list[str]]
"""What each rank printed."""


def run(nproc: int, target: Callable[[int], int]) -> tuple[Lines, str]:
    """Run local ranks; their lines, and all of their stderr, which is shown if one fails."""
    lines: dict[int, list[bytes]] = {rank: [] for rank in range(nproc)}
    errors: list[bytes] = []

    def keep(rank: int, name: str, data: bytes) -> None:
        (errors if name == "stderr" else lines[rank]).append(data)

    result = run_local(nproc, target, preimport=SLOW_IMPORTS, on_output=keep)
    stderr = b"".join(errors).decode()
    assert result.status == 0, f"{result.first_failure and result.first_failure.describe()}\n{stderr}"
    return {rank: b"".join(data).decode().splitlines() for rank, data in lines.items()}, stderr


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], tuple[Path, Lines]]:
    """``recorded(program, nproc)``: its trace and what it printed, recorded once for all tests."""

    @cache
    def run_recorded(name: str, nproc: int) -> tuple[Path, Lines]:
        directory = tmp_path_factory.mktemp(name) / "trace"
        program = Program.parse([str(PROGRAMS_DIR / f"{name}.py")])

        def target(_: int) -> int:
            with record(directory):
                program.run()
            return 0

        return directory, run(nproc, target)[0]

    return run_recorded


def run_replayed(name: str, nproc: int, directory: Path) -> tuple[Lines, list[dict[str, Any]]]:
    """Each rank alone, at the same time; what it printed, and the verdict's counts."""
    program = Program.parse([str(PROGRAMS_DIR / f"{name}.py")])

    def target(rank: int) -> int:
        with replay(directory, rank) as session:
            program.run()
        verdict = session.verdict
        assert verdict is not None
        print("verdict", json.dumps(json.loads(verdict.to_json())))
        return 0

    lines, _ = run(nproc, target)
    verdicts = [json.loads(lines[rank].pop().removeprefix("verdict ")) for rank in range(nproc)]
    return lines, verdicts


def without_handles(lines: Lines) -> Lines:
    return {
        rank: [line for line in said if " handle" not in line.partition(":")[0]]
        for rank, said in lines.items()
    }


@pytest.mark.parametrize("name", PROGRAMS)
def test_program_sees_the_same_plain_recorded_and_replayed(
    name: str, recorded: Callable[[str, int], tuple[Path, Lines]]
) -> None:
    nproc = PROGRAMS[name]
    program = Program.parse([str(PROGRAMS_DIR / f"{name}.py")])

    def run_plain(_: int) -> int:
        program.run()
        return 0

    plain, _ = run(nproc, run_plain)
    directory, while_recording = recorded(name, nproc)
    replayed, verdicts = run_replayed(name, nproc, directory)

    assert all(plain.values())
    assert without_handles(while_recording) == without_handles(plain)
    assert replayed == while_recording
    for rank, verdict in enumerate(verdicts):
        assert verdict["status"] == "ok", verdict
        assert verdict["rank"] == rank
        assert verdict["structure"]["matched"] == verdict["structure"]["total"] > 0
        assert verdict["provenance"]["result"]["synthesised"] == 0


@pytest.mark.parametrize("name", TRAINING)
def test_training_is_replayed_bit_for_bit(
    name: str, recorded: Callable[[str, int], tuple[Path, Lines]]
) -> None:
    directory, while_recording = recorded(name, 4)
    replayed, verdicts = run_replayed(name, 4, directory)
    assert replayed == while_recording
    assert [len(lines) for lines in replayed.values()] == [3, 3, 3, 3]
    for verdict in verdicts:
        assert verdict["status"] == "ok", verdict
        assert verdict["structure"]["training_matched"] == verdict["structure"]["training_total"] > 20
        assert verdict["values"]["identical"] == verdict["values"]["compared"] > 20


def test_every_operator_of_the_table_is_recorded(
    recorded: Callable[[str, int], tuple[Path, Lines]],
) -> None:
    seen: Counter[str] = Counter()
    for name in ("every_op", "p2p", "functional"):
        with open_trace(recorded(name, 4)[0]) as trace:
            assert [record.failure for record in trace.ranks.values()] == [""] * 4
            assert all(record.complete for record in trace.ranks.values())
            for rank in range(4):
                seen.update(call.signature.op for call in trace.rank(rank).call_records())
    assert seen.keys() == {operator.op for operator in operators()}


def test_groups_have_the_same_names_in_every_rank(
    recorded: Callable[[str, int], tuple[Path, Lines]],
) -> None:
    with open_trace(recorded("groups", 4)[0]) as trace:
        groups = {rank: {group.key: group for group in record.groups} for rank, record in trace.ranks.items()}
        used = {rank: {c.signature.group for c in trace.rank(rank).call_records()} for rank in range(4)}
    # the world, three twins, a fourth after one of them was destroyed, the same ranks backwards,
    # a second world; those that nobody used before they were destroyed are known as well
    assert [key for key in groups[0] if key.startswith("0-3")] == ["0-3", *(f"0-3#{n}" for n in range(1, 7))]
    for rank in range(4):
        assert used[rank] <= groups[rank].keys()
        assert all(rank in group.ranks for group in groups[rank].values())
        assert {key: group.ranks for key, group in groups[rank].items() if key.startswith("0-3")} == {
            key: (0, 1, 2, 3) for key in groups[0] if key.startswith("0-3")
        }
    assert groups[0]["0-3#1"].pg_desc == "twin 0"
    assert "1,2" in used[1]
    assert "1,2" not in groups[3]
    assert {"0", "0,2", "0,1", "0,3"} <= used[0]


def test_source_of_a_receive_from_any_is_kept(
    recorded: Callable[[str, int], tuple[Path, Lines]],
) -> None:
    directory, lines = recorded("p2p", 4)
    with open_trace(directory) as trace:
        calls = [c for c in trace.rank(0).call_records() if c.signature.op == "recv_any_source"]
        sources = [c.completion.src_rank for c in calls if c.completion]
        in_group = [c for c in trace.rank(3).call_records() if c.signature.op == "recv_any_source"]
    assert Counter(sources) == {1: 2, 2: 2, 3: 2}
    said = [line for line in lines[0] if "any source handle" in line]
    assert [int(line.rpartition(" ")[2]) for line in said] == sources[:3]
    # a group rank: global rank 1 is the first of group (1, 3)
    assert [c.completion.src_rank for c in in_group if c.completion] == [0]


def test_own_error_of_a_collective_is_in_the_trace(
    recorded: Callable[[str, int], tuple[Path, Lines]],
) -> None:
    directory, lines = recorded("failures", 2)
    with open_trace(directory) as trace:
        calls = list(trace.rank(0).call_records())
    errors = [c.completion.error for c in calls if c.completion and c.completion.error]
    assert [error.partition(":")[0] for error in errors] == ["RuntimeError"] * len(errors)
    assert errors[0] == "RuntimeError: Cannot use ReduceOp.PREMUL_SUM with Gloo"
    assert "invalid tensor size" in errors[1]
    # blocking calls fail at once, the others in their Work
    blocked = {
        (c.signature.is_async, bool(c.completion.return_ns))
        for c in calls
        if c.completion and c.completion.error
    }
    assert blocked == {(False, True), (True, False)}
    assert [c.signature.op for c in calls if c.completion is None] == ["recv"]
    # neither the program's own error nor a silent success
    assert "rank 0 sync: RuntimeError" in lines[0]
    assert "rank 0 async: RuntimeError" in lines[0]
    assert "rank 0 async again: RuntimeError" in lines[0]
    assert "rank 0 functional: RuntimeError" in lines[0]
    # a failure inside torch's C++ that passed it by is raised by the next call
    assert "rank 0 coalesced handle: no error" in lines[0]
    assert "rank 0 next: RuntimeError" in lines[0]


def test_waits_are_recorded_with_their_call(
    recorded: Callable[[str, int], tuple[Path, Lines]],
) -> None:
    with open_trace(recorded("p2p", 4)[0]) as trace:
        ops = {c.row.entry: c.signature.op for c in trace.rank(1).call_records()}
        waits = trace.rank(1).waits.to_pylist()
    waited = Counter(ops[wait["call"]] for wait in waits)
    assert waited["recv"] >= 6
    assert waited["send"] >= 6
    assert all(wait["begin_ns"] <= wait["end_ns"] and wait["call"] < wait["entry"] for wait in waits)


def test_compute_of_a_second_thread_begins_with_it(
    recorded: Callable[[str, int], tuple[Path, Lines]],
) -> None:
    with open_trace(recorded("tensors", 4)[0]) as trace:
        record_ = trace.ranks[0]
        rows = trace.rank(0).calls.to_pylist()
    whole_ns = max(row["enqueue_ns"] for row in rows) - record_.monotonic_ns
    assert all(0 <= row["compute_ns"] <= whole_ns for row in rows)
    assert all(row["compute_cpu_ns"] >= 0 for row in rows)


@pytest.mark.parametrize("method", ["call", "signature", "completion", "wait", "store"])
def test_recorder_steps_aside_when_it_fails(method: str, tmp_path: Path) -> None:
    """Its own failure in the third step: the training goes on, the log and the trace say so."""

    def train(rank: int) -> int:
        logging.basicConfig(format="%(name)s: %(message)s", force=True)
        with record(tmp_path / "trace") as session:
            dist.init_process_group("gloo")
            for step in range(6):
                if step == 3:
                    setattr(session.writer, method, broken)
                tensor = torch.full((step + 2,), rank + 1.0)
                dist.all_reduce(tensor)
                work = dist.all_reduce(tensor, async_op=True)
                assert work is not None
                work.wait()
                assert tensor.tolist() == [6.0] * (step + 2)
            dist.destroy_process_group()
        return 0

    def broken(*_: Any, **__: Any) -> None:
        raise MemoryError("no room for a row")

    _, stderr = run(2, train)
    assert "RankLens stopped recording, the training goes on: no room for a row" in stderr
    with open_trace(tmp_path / "trace") as trace:
        for rank in range(2):
            found = trace.rank(rank)
            assert not found.record.complete
            assert found.record.failure == "recorder: MemoryError: no room for a row"
            # what came before is there, whole
            before = [
                c
                for c in found.call_records()
                if len(c.signature.in_shapes) and c.signature.in_shapes[0][0] < 5
            ]
            assert len(before) == 6
            assert all(c.completion is not None and c.completion.out_addresses for c in before)


def test_dropped_handle_is_recorded_and_let_go(tmp_path: Path) -> None:
    """Fire and forget: the result is kept though nobody asks, and nothing of it stays in memory."""

    def fire(rank: int) -> int:
        with record(tmp_path / "trace"):
            dist.init_process_group("gloo")
            for number in range(50):
                dist.all_reduce(torch.full((4,), float(number)), async_op=True)
            dist.barrier()
            dist.destroy_process_group()
        gc.collect()
        alive = [o for o in gc.get_objects() if isinstance(o, dist.Work)]
        assert len(alive) <= 1, alive
        return 0

    run(2, fire)
    with open_trace(tmp_path / "trace") as trace:
        calls = [c for c in trace.rank(1).call_records() if c.signature.op == "all_reduce"]
        values = [
            torch.frombuffer(
                bytearray(trace.rank(1).payload(c.completion.out_addresses[0])), dtype=torch.float32
            )
            for c in calls
            if c.completion
        ]
    assert [value.tolist() for value in values] == [[2.0 * number] * 4 for number in range(50)]
