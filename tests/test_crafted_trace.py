"""A trace is a stranger's data: with right checksums and the worst content, it makes nothing run."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest
from conftest import RunCli

from ranklens_core.schema import (
    NO_PEER,
    NO_STEP,
    CallRow,
    CompletionRow,
    EnvironmentItem,
    GroupRecord,
    Phase,
    Purpose,
    RunRecord,
    Signature,
)
from ranklens_core.trace import RankHeader, TraceWriter, content_address

PROGRAM = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
value = torch.zeros({nbytes}, dtype=torch.uint8)
dist.broadcast(value, src=1)
print("restored", bytes(value.tolist()) == open("wanted", "rb").read())
print("variables", sorted(set(os.environ) & set({names!r})))
"""

HOSTILE = {
    "LD_PRELOAD": "evil.so",
    "LD_LIBRARY_PATH": "evil",
    "PYTHONPATH": "evil",
    "PYTHONSTARTUP": "evil.py",
    "PYTHONBREAKPOINT": "os.system",
    "PATH": "evil",
    "CC": "evil",
    "CXX": "evil",
    "SOME_PLUGIN": "evil",
    "EXTENSIONS_DIR": "/tmp/evil",
    "AWS_SECRET_ACCESS_KEY": "evil",
    "QUOTED": "$(touch executed)",
}
HARMLESS = {"HIDDEN_SIZE": "64"}


class Touches:
    """Unpickling this makes a file."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("touch executed",)


@pytest.fixture
def crafted(tmp_path: Path) -> Path:
    """One rank of two that received a pickle, in a job with a hostile environment."""
    payload = pickle.dumps(Touches())
    (tmp_path / "wanted").write_bytes(payload)
    names = [*HOSTILE, *HARMLESS]
    (tmp_path / "program.py").write_text(PROGRAM.format(nbytes=len(payload), names=names))
    run = RunRecord(
        format=1,
        oldest_reader=1,
        run_id="crafted",
        world_size=2,
        program="__import__('os').system('touch executed')",
        program_fingerprint="",
        arguments=("; touch executed",),
        framework="",
        backend="gloo",
        created="",
        clock="wall",
        network="",
        cpu_cuda=False,
    )
    header = RankHeader(
        rank=0,
        host="host",
        pid=1,
        local_rank=0,
        has_values=True,
        value_steps=None,
        monotonic_ns=0,
        realtime_ns=0,
    )
    writer = TraceWriter(tmp_path / "trace", run, header)
    for name, value in {**HOSTILE, **HARMLESS}.items():
        writer.environment(EnvironmentItem(kind="variable", name=name, value=value))
    writer.environment(EnvironmentItem(kind="__import__", name="os", value="system"))
    writer.group(GroupRecord(key="0,1", pg_name="0", pg_desc="default_pg", backend="gloo", ranks=(0, 1)))
    writer.signature(
        Signature(
            op="broadcast",
            group="0,1",
            purpose=Purpose.TENSOR,
            peer=1,
            reduce_op="",
            tag=0,
            is_async=False,
            device="cpu",
            in_dtypes=("uint8",),
            in_shapes=((len(payload),),),
            out_dtypes=("uint8",),
            out_shapes=((len(payload),),),
            in_split_sizes=(),
            out_split_sizes=(),
            in_msg_bytes=len(payload),
            out_msg_bytes=len(payload),
            site="",
            program_site="",
        )
    )
    writer.call(
        CallRow(
            entry=0,
            signature=0,
            seq_id=0,
            step=NO_STEP,
            phase=Phase.SETUP,
            training=False,
            batch=-1,
            enqueue_ns=0,
            start_ns=0,
            compute_ns=0,
            compute_cpu_ns=0,
            in_addresses=(),
        )
    )
    address = content_address(payload)
    writer.store(address, memoryview(payload))
    writer.completion(
        CompletionRow(entry=0, end_ns=1, return_ns=2, src_rank=NO_PEER, out_addresses=(address,), error="")
    )
    writer.close(0)
    assert not writer.failure
    return tmp_path


def test_nothing_in_a_trace_is_executed(
    crafted: Path, run_cli: RunCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (*HOSTILE, *HARMLESS):
        if name != "PATH":
            monkeypatch.delenv(name, raising=False)
    replayed = run_cli("replay", "trace", "--rank", "0", "--", "program.py", cwd=crafted)
    assert replayed.returncode == 0, replayed.stderr
    # the bytes arrive as the bytes they are, and of the variables the harmless one alone
    assert replayed.stdout.splitlines() == ["restored True", "variables ['HIDDEN_SIZE', 'PATH']"]
    for verb in ("info", "verify"):
        run_cli(verb, "trace", cwd=crafted)
    assert not (crafted / "executed").exists()
    assert "evil" not in os.environ["PATH"]


def test_the_pickle_would_have_worked(crafted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(crafted)
    pickle.loads((crafted / "wanted").read_bytes())  # noqa: S301 shows that the attack above is one
    assert (crafted / "executed").exists()
