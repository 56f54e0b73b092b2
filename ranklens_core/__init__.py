"""RankLens: run one rank of a distributed training job alone, in the job's own world.

```python
import ranklens_core as ranklens

with ranklens.record("trace", payload="all"):      # inside any rank
    train()
with ranklens.replay("trace", rank=5) as session:  # alone
    train()
session.verdict.structure.matched
with ranklens.emulate(world_size=256, rank=200) as session:  # never recorded
    train()
trace = ranklens.open_trace("trace")               # no torch needed
trace.calls(rank=5).to_pandas()
trace.groups["tp"], trace.steps
```
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ranklens_core.errors import RankLensError
    from ranklens_core.session import emulate, record, replay
    from ranklens_core.trace import Trace, open_trace
    from ranklens_core.verdict import Verdict

__all__ = ["RankLensError", "Trace", "Verdict", "emulate", "open_trace", "record", "replay"]

_HOMES = {
    "RankLensError": "ranklens_core.errors",
    "Trace": "ranklens_core.trace",
    "Verdict": "ranklens_core.verdict",
    "emulate": "ranklens_core.session",
    "open_trace": "ranklens_core.trace",
    "record": "ranklens_core.session",
    "replay": "ranklens_core.session",
}


def __getattr__(name: str) -> Any:
    # on first use: `import ranklens_core` must not cost an import of torch
    if name not in _HOMES:
        raise AttributeError(f"module 'ranklens_core' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
