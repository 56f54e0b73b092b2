"""``ranklens demo``: the main job on this machine, with the very commands a user would type."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import click

NPROC, RANK = 8, 5

PROGRAMS = {
    "megatron": "-m ranklens_megatron.examples.gpt --tp 2 --pp 2 --steps 3",
    "deepspeed": "-m ranklens_deepspeed.examples.zero --stage 3 --steps 3",
}
LAYOUTS = {
    "megatron": "Megatron-core GPT, TP2 x PP2 x DP2, distributed optimizer",
    "deepspeed": "DeepSpeed ZeRO-3 transformer, DP8",
}

_TRAINING_LINE = re.compile(r"rank (\d+) step \d+ loss ")


@click.command()
@click.option("--framework", type=click.Choice(sorted(PROGRAMS)), default="megatron", show_default=True)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=Path("ranklens-demo"),
    show_default=True,
    help="Where the trace goes; a trace of an earlier demo there is replaced.",
)
def command(framework: str, out: Path) -> None:
    """Record an 8-rank job on this machine, then run rank 5 of it alone."""
    program, place = PROGRAMS[framework], shlex.quote(str(out))
    began = time.monotonic()
    click.secho(f"{LAYOUTS[framework]}: {NPROC} ranks on this machine, recorded once", bold=True)
    _run(f"ranklens record --nproc {NPROC} --out {place} --overwrite -- {program}")
    click.secho(f"\nRank {RANK} alone: one process, nobody to talk to, the same training", bold=True)
    status = _run(f"ranklens replay {place} --rank {RANK} -- {program}")
    click.secho("\nTry next", bold=True)
    for line in (
        f"ranklens info {place}",
        f"ranklens replay {place} --rank 0 -- {program}",
        f"ranklens replay {place} --rank 3 --task structure -- {program}",
        f"ranklens demo --framework {'deepspeed' if framework == 'megatron' else 'megatron'}",
    ):
        click.echo(f"  {line}")
    click.echo(f"\n{time.monotonic() - began:.0f} s in all")
    sys.exit(status)


def _run(line: str) -> int:
    """Run a ``ranklens`` command as typed; of the ranks' training lines show rank 5's alone."""
    click.echo(f"$ {line}")
    env = {**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONWARNINGS": "ignore"}
    process = subprocess.Popen(
        [sys.executable, "-m", "ranklens_core", *shlex.split(line)[1:]],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=env,
    )
    assert process.stdout is not None
    kept: list[str] = []
    for text in process.stdout:
        training = _TRAINING_LINE.match(text)
        if training is None:
            kept.append(text)
        if (training and int(training[1]) == RANK) or (
            training is None and text.startswith(("ranklens:", *_VERDICT_STARTS))
        ):
            click.echo(f"  {text}", nl=False)
    status = process.wait()
    if status != 0:
        click.echo("".join(kept), err=True)
        click.echo(f"ranklens demo: the command above ended with status {status}", err=True)
        sys.exit(status)
    return status


_VERDICT_STARTS = ("rank ", "structure ", "values ", "time ", "results ", "environment ", "next ", " " * 20)
