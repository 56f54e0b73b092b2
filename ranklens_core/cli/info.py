"""``ranklens info``: what a trace holds."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import click
import msgspec

from ranklens_core.cli.options import trace_argument
from ranklens_core.errors import TraceError
from ranklens_core.text import printable

if TYPE_CHECKING:
    from ranklens_core.schema import RankRecord
    from ranklens_core.trace import Trace


SHOWN_RANKS = 8
"""Of how many ranks the step times are shown."""


@click.command()
@trace_argument
@click.option("--json", "as_json", is_flag=True, help="The same as JSON.")
def command(trace: Path, as_json: bool) -> None:
    """Say what the trace in DIR holds: program, ranks, groups, steps, values."""
    from ranklens_core.trace import open_trace

    summary = summarise(open_trace(trace), trace)
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(summary), indent=1).decode())
    else:
        click.echo(printable(_words(summary)))


def summarise(trace: Trace, directory: Path) -> dict[str, Any]:
    """Everything ``info`` shows, as plain data."""
    ranks = trace.ranks
    first = next(iter(ranks.values()), None)
    calls = {rank: trace.rank(rank).calls.num_rows for rank in ranks}
    ops: Counter[str] = Counter()
    training = 0
    for rank in ranks:
        recording = trace.rank(rank)
        names = [signature.op for signature in recording.signatures]
        ops.update(names[number] for number in recording.calls["signature"].to_pylist())
        training += sum(recording.calls["training"].to_pylist())
    return {
        "trace": str(directory),
        "format": trace.run.format,
        "created": trace.run.created,
        "program": trace.run.program,
        "world_size": trace.world_size,
        "clock": trace.run.clock,
        "network": trace.run.network,
        "virtual": _virtual(trace),
        "cpu_cuda": trace.run.cpu_cuda,
        "versions": _versions(first),
        "ranks_recorded": len(ranks),
        "ranks_complete": sum(record.complete for record in ranks.values()),
        "ranks_with_values": [rank for rank, record in ranks.items() if record.has_values],
        "value_steps": first.value_steps if first else None,
        "window_only": first.window_only if first else False,
        "bytes": sum(file.stat().st_size for file in directory.rglob("*") if file.is_file()),
        "calls": sum(calls.values()),
        "training_calls": training,
        "ops": dict(ops.most_common()),
        "steps": max((len(record.steps) for record in ranks.values()), default=0),
        "groups": _groups(trace),
        "printed": {metric.name: metric.text for metric in first.printed} if first else {},
        "missing": [str(problem) for problem in trace.missing],
    }


def _virtual(trace: Trace) -> dict[str, Any] | None:
    """The timeline of a virtual clock: every rank's steps, what its transfers came from. None with a
    wall clock; an unusable one says why in ``problem``."""
    from ranklens_core.timing.virtual import is_virtual, virtual_job

    if not is_virtual(trace.run):
        return None
    found: dict[str, Any] = {"provenance": "estimated transfers on recorded compute (CPU time)"}
    try:
        job = virtual_job(trace)
    except TraceError as error:
        return {**found, "problem": str(error)}
    return {
        **found,
        "own_cores": list(trace.run.own_cores),
        "transfers": dict(job.timeline.transfers),
        "step_ns": {
            rank: [step.end_ns - step.begin_ns for step in steps] for rank, steps in job.steps.items()
        },
    }


def _virtual_lines(virtual: dict[str, Any], network: str) -> list[str]:
    lines = [f"virtual time  {virtual['provenance']}, network {network}"]
    if "problem" in virtual:
        return [*lines, f"              not to be had: {virtual['problem']}"]
    if virtual["own_cores"]:
        lines.append(f"              a core of its own: rank {', '.join(map(str, virtual['own_cores']))}")
    lines.extend(
        f"              transfers: {count} {source}" for source, count in virtual["transfers"].items()
    )
    # the first step warms up
    medians = {rank: median(steps[1:] or steps) / 1e6 for rank, steps in virtual["step_ns"].items() if steps}
    shown = [f"rank {rank} {value:.1f}" for rank, value in list(medians.items())[:SHOWN_RANKS]]
    if shown:
        more = f" and {len(medians) - SHOWN_RANKS} more (--json)" if len(medians) > SHOWN_RANKS else ""
        lines.append(f"              median step, ms: {', '.join(shown)}{more}")
    return lines


def _versions(record: RankRecord | None) -> dict[str, str]:
    items = record.environment if record else ()
    return {item.name: item.value for item in items if item.kind == "version"}


def _groups(trace: Trace) -> list[dict[str, Any]]:
    return [
        {"ranks": group.key, "size": len(group.ranks), "role": group.role, "description": group.pg_desc}
        for group in sorted(trace.group_records, key=lambda group: (-len(group.ranks), group.ranks))
    ]


def _words(summary: dict[str, Any]) -> str:
    versions = ", ".join(
        f"{name} {summary['versions'][name]}"
        for name in ("megatron-core", "deepspeed", "torch", "python")
        if name in summary["versions"]
    )
    lines = [
        f"program       {summary['program'] or 'recorded from Python'}",
        f"recorded      {summary['created']}, clock {summary['clock']}"
        f"{', on the CPU stand-in for CUDA' if summary['cpu_cuda'] else ''}",
        f"installed     {versions}",
        f"ranks         {summary['ranks_recorded']} of {summary['world_size']}, "
        f"{summary['ranks_complete']} complete",
        f"values        {_values(summary)}",
        f"size          {summary['bytes'] / 1e6:.1f} MB",
        f"calls         {summary['calls']}, training {summary['training_calls']}, {summary['steps']} steps",
        f"operators     {', '.join(f'{op} {count}' for op, count in summary['ops'].items())}",
    ]
    if summary["virtual"] is not None:
        lines.extend(_virtual_lines(summary["virtual"], summary["network"]))
    lines.extend(_group_lines(summary["groups"]))
    lines.extend(f"missing       {text}" for text in summary["missing"])
    return "\n".join(lines)


def _values(summary: dict[str, Any]) -> str:
    ranks = summary["ranks_with_values"]
    if not ranks:
        return "none: only --task structure can be replayed"
    whose = "all ranks" if len(ranks) == summary["world_size"] else f"ranks {', '.join(map(str, ranks))}"
    window = summary["value_steps"]
    if window is None:
        return whose
    first, end = window
    until = "the end" if end is None else f"step {end}"
    if summary["window_only"]:
        before = f"; no results of the steps before: replay with --from-step {first}, from its checkpoint"
    else:
        before = f"; steps before {first} kept so that a replay can get there" if first else ""
    return f"{whose}; inputs compared from step {first} to {until}{before}"


def _group_lines(groups: list[dict[str, Any]]) -> list[str]:
    by_role: dict[tuple[str, int], list[str]] = {}
    for group in groups:
        name = group["role"] or group["description"] or "group"
        by_role.setdefault((name, group["size"]), []).append(f"[{group['ranks']}]")
    lines = []
    for (name, size), members in by_role.items():
        shown = " ".join(members[:4]) + (f" and {len(members) - 4} more" if len(members) > 4 else "")
        lines.append(f"groups        {name:<22} {len(members)} x {size} ranks   {shown}")
    return lines
