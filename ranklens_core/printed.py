"""Losses and gradient norms that the program prints, taken from its standard output as text."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable

from ranklens_core.patches import Patches
from ranklens_core.schema import NO_STEP, Printed

_METRIC = re.compile(
    r"(?<![a-z])(?P<name>loss|grad[ _]norm)\b['\"]?\s*[:=]?\s*"
    r"(?P<text>[-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?|[-+]?(?:nan|inf))(?![\w.])",
    re.IGNORECASE,
)


def metrics_in(line: str, step: int = NO_STEP) -> list[Printed]:
    """The metrics in one line, printed in ``step``, in order.

    >>> [(m.name, m.text) for m in metrics_in("step 2 loss 4.5 grad_norm 1.5E-01")]
    [('loss', '4.5'), ('grad_norm', '1.5E-01')]
    """
    return [
        Printed(name=match["name"].lower().replace(" ", "_"), text=match["text"], step=step)
        for match in _METRIC.finditer(line)
    ]


class PrintedMetrics:
    """Watches ``sys.stdout`` and tells ``on_metric`` of each metric of each finished line. ``step`` says in
    which step the program is."""

    def __init__(self, on_metric: Callable[[Printed], None], step: Callable[[], int]) -> None:
        self._on_metric = on_metric
        self._step = step
        self._line = ""
        self._patches = Patches()
        if sys.stdout is None:  # closed before python began (`>&-`): nothing will be printed
            return
        write = sys.stdout.write

        def watched(text: str) -> int:
            written = write(text)
            self._see(text)
            return written

        self._patches.set(sys.stdout, "write", watched)

    def _see(self, text: str) -> None:
        *finished, self._line = (self._line + text).split("\n")
        for line in finished:
            for metric in metrics_in(line, self._step()):
                self._on_metric(metric)

    def remove(self) -> None:
        """Watch no longer; a last line without its end counts. Idempotent."""
        if self._line:
            self._see("\n")
        self._patches.undo()
