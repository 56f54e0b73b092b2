"""What went wrong in a job, from its trace or its Flight Recorder dumps: see ``diagnose``.

``job`` is what is looked at, ``sequences`` its collectives side by side; ``disagreement``, ``lag``,
``waiting``, ``replicas`` and ``straggler`` each look for one kind of trouble; ``diagnosis`` puts it together,
``answer`` and ``words`` say it.
"""

from __future__ import annotations

import os

from ranklens_core.diagnose.diagnosis import diagnose_job
from ranklens_core.diagnose.findings import Diagnosis
from ranklens_core.diagnose.recording import read_recording
from ranklens_core.trace import open_trace

__all__ = ["Diagnosis", "diagnose", "diagnose_job"]


def diagnose(path: str | os.PathLike[str]) -> Diagnosis:
    """Diagnose the job recorded at ``path``."""
    with open_trace(path) as trace:
        return diagnose_job(read_recording(trace), os.fspath(path))
