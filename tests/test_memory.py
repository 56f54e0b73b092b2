"""Peaks by step, RankLens' own part kept small and stated."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from conftest import RunCli

from ranklens_core.memory import NCCL_CHANNELS, NCCL_CONNECTION_BYTES, ResidentPeak, comm_buffers
from ranklens_core.schema import GroupRecord
from ranklens_core.trace.files import LocalFiles, open_new
from ranklens_core.trace.payload import PayloadReader, PayloadWriter, ValueRow, content_address
from ranklens_core.trace.staging import Staging

MIB = 1 << 20
ALLOCATING = Path(__file__).parent / "programs" / "allocating.py"


def mapped_bytes() -> int:
    """Resident memory of this process that is pages of files."""
    found = re.search(r"^RssFile:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


def test_the_peak_of_each_step(run_cli: RunCli, tmp_path: Path) -> None:
    recorded = run_cli("record", "--nproc", "2", "--out", "trace", "--", ALLOCATING)
    assert recorded.returncode == 0, recorded.stderr
    replayed = run_cli(
        *("replay", "trace", "--rank", "0", "--task", "memory", "--verdict", "v.json", "--", ALLOCATING)
    )
    assert replayed.returncode == 0, replayed.stderr
    memory = json.loads((tmp_path / "v.json").read_text())["memory"]
    peaks = [step["peak_bytes"] for step in memory["steps"]]
    assert [step["index"] for step in memory["steps"]] == [0, 1, 2, 3]
    # Step 1 takes 96 MiB more than its neighbours. Resident memory counts the allocator's leavings
    # and libraries first touched in a step too: ten-odd MiB on a busy machine.
    assert peaks[1] - peaks[0] > 72 * MIB
    assert peaks[1] - peaks[3] > 72 * MIB
    assert memory["counter"] == "resident"
    assert memory["own_values_bytes"] == 4 * MIB
    assert memory["own_tables_bytes"] < 16 * MIB
    assert "memory              peak" in replayed.stderr
    assert "in step 1" in replayed.stderr


def test_a_mismatch_is_reported_and_the_program_goes_on(run_cli: RunCli, tmp_path: Path) -> None:
    recorded = run_cli("record", "--nproc", "2", "--out", "trace", "--", ALLOCATING)
    assert recorded.returncode == 0, recorded.stderr
    changed = tmp_path / "changed.py"
    changed.write_text(ALLOCATING.read_text().replace("net.weight.grad", "net.bias.grad"))
    replayed = run_cli(
        *("replay", "trace", "--rank", "0", "--task", "memory", "--verdict", "v.json", "--", changed)
    )
    verdict = json.loads((tmp_path / "v.json").read_text())
    assert (replayed.returncode, verdict["status"]) == (3, "structure-mismatch")
    assert len(verdict["memory"]["steps"]) == 4
    assert verdict["provenance"]["result"] == {"recorded": 4, "synthesised": 4}


def test_released_values_take_no_memory_and_stay_readable(tmp_path: Path) -> None:
    writer = PayloadWriter(tmp_path, open_new)
    rows: list[ValueRow] = []
    for fill in (b"a", b"b", b"c"):
        data = fill * (16 * MIB)
        rows.append(writer.append(content_address(data), Staging(0).copy(data)))
    writer.flush()
    writer.close()
    reader = PayloadReader("rank", rows, LocalFiles(str(tmp_path)).data)
    reader.get(rows[0].address)
    before = mapped_bytes()
    values = [reader.get(row.address) for row in rows]
    assert mapped_bytes() - before > 30 * MIB
    for row in rows:
        reader.release(row.address)
    assert mapped_bytes() - before < 0
    assert [bytes(value[:1]) for value in values] == [b"a", b"b", b"c"]
    reader.release(b"no such address.")


def test_a_counter_that_cannot_be_reset_says_so(tmp_path: Path) -> None:
    (tmp_path / "status").write_text("Name:\tx\nVmHWM:\t  2048 kB\nRssAnon:\t 1024 kB\n")
    (tmp_path / "clear_refs").mkdir()
    peak = ResidentPeak(tmp_path)
    assert (peak.name, peak.peak_bytes(), peak.private_bytes()) == ("resident, highest so far", 2 * MIB, MIB)


@pytest.mark.parametrize(
    ("backends", "communicators"), [(["gloo"], 0), (["nccl", "cpu:gloo,cuda:nccl", "gloo"], 2)]
)
def test_communication_buffers_are_a_stated_constant(backends: list[str], communicators: int) -> None:
    groups = [
        GroupRecord(key=f"0,1#{n}", pg_name=str(n), pg_desc="", backend=backend, ranks=(0, 1))
        for n, backend in enumerate(backends)
    ]
    alone = GroupRecord(key="0", pg_name="a", pg_desc="", backend="nccl", ranks=(0,))
    buffers = comm_buffers([*groups, alone])
    assert buffers.nbytes == communicators * NCCL_CHANNELS * NCCL_CONNECTION_BYTES
    assert f"{communicators or 'no'} NCCL communicator" in buffers.basis
