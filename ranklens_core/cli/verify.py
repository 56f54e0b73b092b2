"""``ranklens verify``: is the trace whole and undamaged."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from ranklens_core.cli.options import trace_argument
from ranklens_core.errors import TraceError
from ranklens_core.text import printable


@click.command()
@trace_argument
def command(trace: Path) -> None:
    """Check every byte of the trace in DIR; lists all problems, exit status 5 if there are any."""
    from ranklens_core.trace import verify

    report = verify(trace)
    for problem in report.problems:
        click.echo(printable(str(problem)))
    if not report.ok:
        click.echo(f"{trace}: {len(report.problems)} problems", err=True)
        sys.exit(TraceError.exit_status)
    click.echo(f"{trace}: whole and undamaged")
