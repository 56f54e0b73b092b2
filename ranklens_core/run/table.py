"""A sweep's results as one table; every number has a letter that says where it comes from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ranklens_core.run.sweep import Figure, Row, Sweep
from ranklens_core.text import printable

SOURCES = {
    "recorded": ("r", "recorded"),
    "virtual": ("v", "the virtual clock's: estimated transfers on recorded compute"),
    "kept": ("k", "replayed, every result at its recorded time"),
    "estimated": ("e", "replayed, some or all times estimated: each verdict says how many"),
    "fast": ("f", "replayed as fast as results can be had, no time kept (task=profile keeps it)"),
    "resident": ("m", "the most resident in a step"),
    "allocated": ("a", "the most allocated on the GPU in a step"),
    "process": ("p", "the most resident of the whole replay process, torch included (task=memory: by step)"),
}
"""Source of a ``Figure``: its letter, and what that means."""

_HEADINGS = (
    "rank",
    "roles",
    "step ms",
    "recorded ms",
    "error",
    "exposed ms",
    "peak MiB",
    "structure",
    "values",
)


def table(sweep: Sweep) -> str:
    """Rows, then what the letters in them mean, then what went wrong in words."""
    rows = sweep.rows()
    lines = [*_aligned([_headings(rows), *(_cells(row, with_overrides=_differ(rows)) for row in rows)])]
    used = {figure.source for row in rows for figure in _figures(row)}
    lines += [f"{letter}  {meaning}" for source, (letter, meaning) in SOURCES.items() if source in used]
    lines.append(
        "step, recorded, exposed (waiting for peers and transfer that held the program): medians over the "
        "steps after the first"
    )
    for result in sweep.results:
        message = result.outcome.error or (result.verdict.message if result.verdict else "")
        if result.outcome.status and message:
            lines.append(f"rank {result.outcome.rank}, {' '.join(result.outcome.overrides)}: {message}")
    if sweep.missing:
        lines.append(f"{sweep.missing} jobs ended without a result: see the launcher's messages")
    return printable("\n".join(lines))


def _differ(rows: Sequence[Row]) -> bool:
    return any(row.overrides for row in rows)


def _headings(rows: Sequence[Row]) -> list[str]:
    return [*_HEADINGS, *(["with"] if _differ(rows) else []), "verdict"]


def _cells(row: Row, *, with_overrides: bool) -> list[str]:
    return [
        str(row.rank),
        "  ".join(row.roles) or "-",
        _figure(row.step),
        _figure(row.recorded_step),
        "-" if row.error_pct is None else f"{row.error_pct:.1f}%",
        _figure(row.exposed),
        _figure(row.peak, digits=0),
        _share(row.structure),
        _share(row.values),
        *([" ".join(row.overrides)] if with_overrides else []),
        row.verdict,
    ]


def _figures(row: Row) -> Iterable[Figure]:
    return (figure for figure in (row.step, row.recorded_step, row.exposed, row.peak) if figure is not None)


def _figure(figure: Figure | None, digits: int = 1) -> str:
    return "-" if figure is None else f"{figure.value:.{digits}f} {SOURCES[figure.source][0]}"


def _share(pair: tuple[int, int] | None) -> str:
    return "-" if pair is None else f"{pair[0]}/{pair[1]}"


def _aligned(rows: Sequence[Sequence[str]]) -> Iterable[str]:
    """Columns as wide as their widest cell; the numbers between roles and values to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    right = range(2, len(_HEADINGS))
    for row in rows:
        cells = (
            cell.rjust(width) if column in right or column == 0 else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        yield "   ".join(cells).rstrip()
