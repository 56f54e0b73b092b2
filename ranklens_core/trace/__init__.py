"""A run on disk: ``TraceWriter`` writes a rank, ``open_trace`` reads a run, ``verify`` checks it.

The format is described in ``docs/trace-format.md``. Nothing here needs torch.
"""

from ranklens_core.trace.ending import JobEnding, read_ending, write_ending
from ranklens_core.trace.layout import (
    RUN_FILE,
    check_replaceable,
    prepare_directory,
    rank_directory,
    remove_ranks_outside,
    replace_trace,
)
from ranklens_core.trace.lines import RankHeader
from ranklens_core.trace.payload import content_address
from ranklens_core.trace.problem import Problem, ProblemKind
from ranklens_core.trace.ranktrace import RankTrace
from ranklens_core.trace.reader import Trace, open_trace
from ranklens_core.trace.runfile import write_run
from ranklens_core.trace.verify import VerifyReport, verify
from ranklens_core.trace.writer import TraceWriter

__all__ = [
    "RUN_FILE",
    "JobEnding",
    "Problem",
    "ProblemKind",
    "RankHeader",
    "RankTrace",
    "Trace",
    "TraceWriter",
    "VerifyReport",
    "check_replaceable",
    "content_address",
    "open_trace",
    "prepare_directory",
    "rank_directory",
    "read_ending",
    "remove_ranks_outside",
    "replace_trace",
    "verify",
    "write_ending",
    "write_run",
]
