"""The table of a sweep: one row a rank, every number with its source; the greatest exit status."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from conftest import RunCli

from ranklens_core.run.job import OUTCOME, VERDICT, Outcome
from ranklens_core.run.sweep import Figure, Sweep
from ranklens_core.run.table import SOURCES, table
from ranklens_core.verdict import (
    VERDICT_VERSION,
    CallCounts,
    CommBuffers,
    Compared,
    MemoryResult,
    MemoryStep,
    PrintedResult,
    Provenance,
    Status,
    StepResult,
    StructureResult,
    TimingResult,
    ValuesResult,
    Verdict,
)

TINY = Path(__file__).parent / "programs" / "tiny.py"
MS, MIB = 1_000_000, 2**20

TIMED = TimingResult(
    mean_abs_error_pct=2.5,
    worst_abs_error_pct=3.0,
    step=Compared(replayed_ns=41 * MS, recorded_ns=40 * MS, error_pct=2.5),
    wait=Compared(replayed_ns=7 * MS, recorded_ns=6 * MS, error_pct=0.0),
    transfer=Compared(replayed_ns=3 * MS, recorded_ns=3 * MS, error_pct=0.0),
)
REMEMBERED = MemoryResult(
    counter="resident",
    set_up_bytes=MIB,
    steps=(MemoryStep(index=0, peak_bytes=300 * MIB), MemoryStep(index=1, peak_bytes=320 * MIB)),
    own_tables_bytes=0,
    own_values_bytes=0,
    comm_buffers=CommBuffers(nbytes=0, basis=""),
)


def verdict_of(rank: int, task: str, **changes: object) -> Verdict:
    """Three steps: 90, 20 and 30 ms, recorded 100, 40 and 60 ms."""
    steps = zip((90, 20, 30), (100, 40, 60), strict=True)
    plain = Verdict(
        version=VERDICT_VERSION,
        task=task,
        rank=rank,
        world_size=16,
        emulated=False,
        status=Status.OK,
        message="",
        calls=CallCounts(recorded=12, replayed=12),
        structure=StructureResult(
            matched=12, total=12, training_matched=9, training_total=9, first_mismatch=None
        ),
        values=ValuesResult(
            identical=9, compared=9 if task == "debug" else 0, first_divergence=None, why_none=""
        ),
        provenance=Provenance(
            result={"recorded": 12, "synthesised": 0}, time={"recorded": 12, "estimated": 0}
        ),
        steps=tuple(
            StepResult(
                index=index,
                wall_ns=now * MS,
                recorded_ns=then * MS,
                error_pct=None,
                parts=None,
                recorded_parts=None,
            )
            for index, (now, then) in enumerate(steps)
        ),
        timing=TimingResult(),
        memory=None,
        environment=(),
        printed=PrintedResult(identical=0, compared=0, last={}, first_difference=""),
        bypassed=(),
        roles=(f"dp {rank}/16",),
        versions=(),
    )
    return msgspec.structs.replace(plain, **changes)


def write_job(
    sweep: Path, number: int, verdict: Verdict | None, *overrides: str, status: int = 0, error: str = ""
) -> None:
    directory = sweep / str(number)
    directory.mkdir(parents=True)
    rank = verdict.rank if verdict else 3
    outcome = Outcome(
        overrides=("target=x", f"rank={rank}", *overrides, "recorded=true"),
        trace=str(sweep / "nowhere"),
        rank=rank,
        task=verdict.task if verdict else "",
        status=status,
        error=error,
        peak_rss_bytes=450 * MIB,
    )
    (directory / OUTCOME).write_bytes(msgspec.json.encode(outcome))
    if verdict is not None:
        (directory / VERDICT).write_bytes(verdict.to_json())


def test_tasks_of_a_rank_share_a_row(tmp_path: Path) -> None:
    write_job(tmp_path, 0, verdict_of(7, "debug"), "task=debug")
    write_job(tmp_path, 1, verdict_of(7, "profile", timing=TIMED), "task=profile")
    write_job(tmp_path, 2, verdict_of(7, "memory", memory=REMEMBERED), "task=memory")
    (row,) = Sweep.read_all(tmp_path, expected=3).rows()
    assert (row.rank, row.roles, row.overrides, row.verdict) == (7, ("dp 7/16",), (), "ok")
    assert row.step == Figure(41.0, "kept")
    assert row.recorded_step == Figure(50.0, "recorded")
    assert row.error_pct == 2.5
    assert row.exposed == Figure(10.0, "kept")
    assert row.peak == Figure(320.0, "resident")
    assert (row.structure, row.values) == ((12, 12), (9, 9))


def test_without_time_and_memory_the_sources_say_so(tmp_path: Path) -> None:
    write_job(tmp_path, 0, verdict_of(7, "debug"))
    (row,) = Sweep.read_all(tmp_path, expected=1).rows()
    assert row.step == Figure(25.0, "fast")  # the median of 20 and 30: the first step warms up
    assert (row.error_pct, row.exposed) == (None, None)
    assert row.peak == Figure(450.0, "process")


def test_estimated_virtual_and_made_up_are_labelled(tmp_path: Path) -> None:
    provenance = Provenance(
        result={"recorded": 8, "synthesised": 4}, time={"recorded": 8, "estimated": 4}, clock="virtual"
    )
    write_job(tmp_path, 0, verdict_of(0, "tune", timing=TIMED, provenance=provenance))
    (row,) = Sweep.read_all(tmp_path, expected=1).rows()
    assert (row.step, row.recorded_step) == (Figure(41.0, "estimated"), Figure(50.0, "virtual"))
    assert row.verdict == "ok, 4 results made up"


def test_the_table(tmp_path: Path) -> None:
    mismatch = StructureResult(
        matched=11, total=12, training_matched=8, training_total=9, first_mismatch=None
    )
    write_job(tmp_path, 10, verdict_of(15, "debug"), "what_if.bandwidth=2")
    write_job(
        tmp_path,
        2,
        verdict_of(0, "debug", status=Status.STRUCTURE_MISMATCH, structure=mismatch, message="call 3"),
        "what_if.bandwidth=1",
        status=3,
    )
    write_job(tmp_path, 11, None, "what_if.bandwidth=2", status=5, error="no values")
    sweep = Sweep.read_all(tmp_path, expected=4)
    assert sweep.worst_status == 5
    lines = table(sweep).splitlines()
    assert lines[0].split("   ")[0] == "rank"
    assert [line.split()[0] for line in lines[1:4]] == ["0", "15", "3"]  # by job number, not by name
    assert lines[1].endswith("11/12      9/9   what_if.bandwidth=1   structure-mismatch")
    assert lines[3].endswith("what_if.bandwidth=2   no verdict, exit status 5")
    text = "\n".join(lines)
    assert "rank 0, target=x rank=0 what_if.bandwidth=1 recorded=true: call 3" in text
    assert "rank 3, target=x rank=3 what_if.bandwidth=2 recorded=true: no values" in text
    assert "1 jobs ended without a result" in text
    used = [letter for letter, meaning in SOURCES.values() if f"\n{letter}  {meaning}\n" in f"{text}\n"]
    assert used == ["r", "f", "p"]


def test_a_sweep_that_left_nothing_is_a_failure(tmp_path: Path) -> None:
    assert Sweep.read_all(tmp_path, expected=2).worst_status == 1
    assert Sweep(()).worst_status == 1


def test_a_sweep_in_parallel(run_cli: RunCli, tmp_path: Path) -> None:
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    result = run_cli(
        "run",
        "-m",
        "target=own",
        "target.world_size=4",
        "workload=own",
        f"workload.program={TINY}",
        "+workload.environment.TP=2",
        "rank=0,3",
        "task=debug,profile",
        "hydra/launcher=joblib",
        "hydra.launcher.n_jobs=2",
    )
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("$ TP=2 ranklens record") == 1
    assert result.stderr.count("$ TP=2 ranklens replay") == 4
    lines = result.stderr.splitlines()
    first = next(index for index, line in enumerate(lines) if line.startswith("rank   roles"))
    assert [line.split()[0] for line in lines[first + 1 : first + 3]] == ["0", "3"]
    assert all(line.endswith("ok") for line in lines[first + 1 : first + 3])
    (sweep,) = (tmp_path / "ranklens-runs" / "sweeps").iterdir()
    assert sorted(path.parent.name for path in sweep.glob("*/verdict.json")) == ["0", "1", "2", "3"]


def test_the_worst_status_of_a_sweep_passes_through(run_cli: RunCli, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TINY.read_text())
    own = ("target=own", "target.world_size=2", "workload=own", "workload.program=train.py")
    assert run_cli("run", *own).returncode == 0
    changed = TINY.read_text().replace(
        "dist.init_process_group", "torch.manual_seed(0)\n    dist.init_process_group"
    )
    (tmp_path / "train.py").write_text(changed.replace("manual_seed(3)", "manual_seed(4)"))
    result = run_cli("run", "-m", *own, "rank=0,1", "task=debug,structure")
    assert result.returncode == 4, result.stderr
    assert "debug values-diverged; structure ok" in result.stderr
