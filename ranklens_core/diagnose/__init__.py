"""What went wrong in a job, from its trace or its Flight Recorder dumps: see ``diagnose``.

``job`` is what is looked at, ``sequences`` its collectives side by side; ``disagreement``, ``lag``,
``waiting``, ``replicas`` and ``straggler`` each look for one kind of trouble; ``diagnosis`` puts it together,
``answer`` and ``words`` say it.
"""

from __future__ import annotations

import os
from pathlib import Path

from ranklens_core.diagnose.diagnosis import diagnose_job
from ranklens_core.diagnose.findings import Diagnosis
from ranklens_core.diagnose.flight_recorder import read_flight_recorder
from ranklens_core.diagnose.recording import read_recording
from ranklens_core.trace import RUN_FILE, open_trace
from ranklens_core.trace.layout import rank_of_directory

__all__ = ["Diagnosis", "diagnose", "diagnose_job"]


def diagnose(path: str | os.PathLike[str]) -> Diagnosis:
    """Diagnose the job recorded at ``path``: a trace (a directory, or a URL), whole or cut off, or Flight
    Recorder dumps (a directory, or one file).

    Raises:
        TraceNotFoundError: nothing is there.
        TraceError: nothing that is there can be read.
    """
    text = os.fspath(path)
    if "://" not in text and not is_trace(Path(text)):
        return diagnose_job(read_flight_recorder(Path(text)), text)
    with open_trace(path) as trace:
        return diagnose_job(read_recording(trace), text)


def is_trace(path: Path) -> bool:
    """Whether ``path`` is a directory that RankLens wrote, or nothing at all."""
    if not path.is_dir():
        return not path.exists()
    return any(name == RUN_FILE or rank_of_directory(name) is not None for name in os.listdir(path))
