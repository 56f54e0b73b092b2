"""``ranklens diagnose``: what went wrong in a job, and which rank began it."""

from __future__ import annotations

import sys
from pathlib import Path

import click
import msgspec

from ranklens_core.errors import UsageError
from ranklens_core.text import printable

TO_STDOUT = "-"


@click.command()
@click.argument("trace", type=click.Path(path_type=Path), metavar="DIR", required=False)
@click.option(
    "--json",
    "json_file",
    is_flag=False,
    flag_value=TO_STDOUT,
    metavar="[FILE]",
    help="The same as JSON: into FILE, or to stdout in place of the report.",
)
def command(trace: Path | None, json_file: str | None) -> None:
    """Say what went wrong in the job recorded in DIR: a hang, a crash, calls that do not fit.

    DIR is a trace, whole or cut off, or a directory of PyTorch Flight Recorder dumps (or one such file).
    The first sentence of the report is the answer: which rank did what, and who waits for it.

    Exit status: 0 nothing found; 3 ranks disagree, wait for ever or died; 4 values differ that should be the
    same; 5 nothing there can be read.
    """
    from ranklens_core.diagnose import diagnose
    from ranklens_core.diagnose.words import report

    if trace is None and json_file not in (None, TO_STDOUT):
        trace, json_file = Path(str(json_file)), TO_STDOUT  # --json DIR
    if trace is None:
        raise UsageError("Which trace? Name its directory: ranklens diagnose DIR")
    found = diagnose(trace)
    text = msgspec.json.format(msgspec.json.encode(found), indent=1)
    if json_file == TO_STDOUT:
        click.echo(text.decode())
    else:
        if json_file is not None:
            try:
                Path(json_file).write_bytes(text + b"\n")
            except OSError as error:
                raise UsageError(f"{json_file} cannot be written: {error.strerror}") from error
        click.echo(printable(report(found)))
    sys.exit(found.exit_status)
