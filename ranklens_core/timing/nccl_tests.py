"""Read what nccl-tests prints (all_reduce_perf and the others), also several logs in one file.

The size column is the message size nccl-tests uses: see ``message.message_bytes``. The format is that of
nccl-tests src/util.cu (2.x, July 2026) and of its older releases, which print no test name and may leave
redop and root blank.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from ranklens_core.errors import UsageError

_TEST_OP = {
    "all_reduce": "all_reduce",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "alltoall": "all_to_all",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "gather": "gather",
    "scatter": "scatter",
    "sendrecv": "send_recv",
}
# torch works in place on these; the others read one buffer and write another.
_IN_PLACE_OPS = frozenset({"all_reduce", "broadcast", "reduce"})
_DTYPE_BYTES = {
    "int8": 1, "uint8": 1, "int32": 4, "uint32": 4, "int64": 8, "uint64": 8, "half": 2, "float": 4,
    "double": 8, "bfloat16": 2, "f8e4m3": 1, "f8e5m2": 1, "fp8_e4m3": 1, "fp8_e5m2": 1,
}  # fmt: skip
_TORCH_DTYPE = {
    "half": "float16", "float": "float32", "double": "float64", "f8e4m3": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn", "f8e5m2": "float8_e5m2", "fp8_e5m2": "float8_e5m2",
}  # fmt: skip
# mpirun --tag-output and srun --label put these before each line.
_LAUNCHER_TAG = re.compile(r"^(?:\[[\d,]+\]<std\w+>:\s?|\d+:\s(?=\s*[#\d]))")
_TEST_NAME = re.compile(r"\b(" + "|".join(sorted(_TEST_OP, key=len, reverse=True)) + r")_perf\b")
_RANK_LINE = re.compile(r"^#\s+Rank\s+\d+\s+(?:Group\s+(\d+)\s+)?Pid\s+\d+\s+on\s+(\S+)\s+device")


@dataclass(frozen=True)
class Measurement:
    """One measured call: a line of an nccl-tests log, or a recorded call."""

    op: str
    n_ranks: int
    n_nodes: int
    message_bytes: int
    transfer_ns: int
    dtype: str | None = None
    """torch's name (``bfloat16``); None if unknown."""
    group_ranks: tuple[int, ...] | None = None
    """The recorded call's global ranks; None for nccl-tests, which stands for any group of that shape."""


def read_nccl_tests_log(path: str | Path, *, op: str | None = None) -> list[Measurement]:
    """Read a log file. ``op`` names the test where the log does not. Raises UsageError naming the line."""
    file = Path(path)
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise UsageError(f"cannot read the nccl-tests log {file}: {error.strerror}") from error
    return parse_nccl_tests_log(text, where=str(file), op=op)


def parse_nccl_tests_log(text: str, *, where: str = "log", op: str | None = None) -> list[Measurement]:
    """Every row of every test in ``text``, in order.

    In-place times for all-reduce, broadcast and reduce (torch's are in place), out-of-place ones for the
    rest; the other column where that one is absent. Raises UsageError: no rows, a row before its header,
    CPU times instead of latencies, an op or a rank list that the log does not give.
    """
    measurements: list[Measurement] = []
    run = _Run(op=op)
    for number, raw in enumerate(text.splitlines(), start=1):
        line = _LAUNCHER_TAG.sub("", raw.rstrip())
        at = f"{where}:{number}"
        name = _TEST_NAME.search(line)
        if name and op is None and "concluded" not in line:
            run.op = _TEST_OP[name.group(1)]
        if line.startswith("#"):
            run = run.after_comment(line, at, keep_op=op)
        elif re.match(r"\s*\d+\s+\d+\s+[a-z]", line):
            measurements.append(run.measurement(line.split(), at))
    if not measurements:
        raise UsageError(f"{where}: no nccl-tests result rows; expected the output of a *_perf program")
    return measurements


@dataclass
class _Run:
    """What the comment lines of one test have said so far."""

    op: str | None = None
    hosts_by_group: dict[str, list[str]] = field(default_factory=dict)
    columns: list[str] = field(default_factory=list)

    def after_comment(self, line: str, at: str, keep_op: str | None) -> _Run:
        words = line.lstrip("# ").split()
        if line.startswith("# Using devices"):
            return _Run(op=self.op)
        if line.startswith("# Out of bounds values"):
            # The test's footer: an appended log must name its own op and ranks.
            return _Run(op=keep_op)
        if rank := _RANK_LINE.match(line):
            self.hosts_by_group.setdefault(rank.group(1) or "0", []).append(rank.group(2))
            if line.endswith("..."):
                raise UsageError(f"{at}: nccl-tests cut its rank list; run one GPU a process (-g 1)")
        elif words[:2] == ["size", "count"]:
            if "cputime" in words:
                raise UsageError(f"{at}: this log holds CPU times; run nccl-tests without -C 1")
            self.columns = words
        return self

    def measurement(self, row: list[str], at: str) -> Measurement:
        if not self.columns:
            raise UsageError(f"{at}: a row before its '# size count type ...' header; keep the whole log")
        if not self.hosts_by_group:
            raise UsageError(f"{at}: no '# Rank ...' lines above this row; keep the whole log")
        hosts = next(iter(self.hosts_by_group.values()))
        size, count, dtype, *rest = row
        blocks, middle = _time_blocks(self.columns, rest, at)
        op = self.op or _infer_op(int(size), int(count), dtype, middle, len(hosts), at)
        time_us = _choose_time(blocks, in_place=op in _IN_PLACE_OPS, at=at)
        return Measurement(
            op=op,
            n_ranks=len(hosts),
            n_nodes=len(set(hosts)),
            message_bytes=int(size),
            transfer_ns=round(time_us * 1000),
            dtype=_TORCH_DTYPE.get(dtype, dtype),
        )


def _time_blocks(columns: list[str], rest: list[str], at: str) -> tuple[list[list[str]], list[str]]:
    """Split a row after its type into [out-of-place, in-place] columns and what stands before them."""
    first = columns.index("time") if "time" in columns else len(columns)
    timed = columns[first:]
    has_timestamp = bool(timed) and timed[-1] == "timestamp"
    width = (len(timed) - has_timestamp) // 2
    values = rest[: len(rest) - 2] if has_timestamp else rest  # a timestamp is two words, date and time
    if not width or len(values) < width:
        raise UsageError(f"{at}: {len(rest)} values do not fit the header's columns {columns}")
    if len(values) < 2 * width:  # out-of-place left blank
        return [[], values[-width:]], values[:-width]
    return [values[-2 * width : -width], values[-width:]], values[: -2 * width]


def _choose_time(blocks: list[list[str]], *, in_place: bool, at: str) -> float:
    preferred, other = (blocks[1], blocks[0]) if in_place else (blocks[0], blocks[1])
    for text in _first_of(preferred, other):
        try:
            time_us = float(text)
        except ValueError:
            continue
        if time_us > 0:
            return time_us
    raise UsageError(f"{at}: no time in microseconds in this row")


def _first_of(*blocks: list[str]) -> Iterator[str]:
    return (block[0] for block in blocks if block)


def _infer_op(size: int, count: int, dtype: str, middle: list[str], n_ranks: int, at: str) -> str:
    """The op from a row of a log that does not name it (nccl-tests before 2.14)."""
    reduces = bool(middle) and middle[0] in {"sum", "prod", "min", "max", "avg", "mulsum"}
    rooted = len(middle) == 2 and not middle[1].startswith("-")
    whole = n_ranks == 1 or count * _DTYPE_BYTES.get(dtype, 0) == size
    if whole and size and reduces:
        return "reduce" if rooted else "all_reduce"
    if whole and size and rooted:
        return "broadcast"
    if size and reduces:
        return "reduce_scatter"
    raise UsageError(
        f"{at}: the log does not say which test it is; write the program's name above it, such as "
        "'# all_gather_perf'"
    )
