"""How a result reaches the program: at once, or when it would have."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from enum import StrEnum
from typing import Protocol

import torch
from torch._C._distributed_c10d import Work

from ranklens_core.c10d.call import Call
from ranklens_core.c10d.ops import Returns
from ranklens_core.c10d.signature import Interned
from ranklens_core.c10d.work import FINISHED, AnySourceWork, completed_work
from ranklens_core.schema import CallRecord

Fill = Callable[[], None]
"""Writes a call's outputs; called once, when the result arrives."""


class TimeSource(StrEnum):
    """Where the time of a call comes from."""

    RECORDED = "recorded"
    ESTIMATED = "estimated"
    NONE = "none"

    __hash__ = str.__hash__  # Enum's own, in Python, is slow for what every call counts by


class Delivery(Protocol):
    """Answers a call whose result is known. ``times`` counts calls by ``TimeSource``."""

    times: Counter[str]

    def enter(self) -> int:
        """The program makes a call now: the time that ``deliver`` is to be given, in ns."""
        ...

    def deliver(
        self,
        call: Call,
        interned: Interned,
        record: CallRecord | None,
        fill: Fill,
        entered_ns: int,
        alike: CallRecord | None = None,
    ) -> Work | None:
        """The Work of ``call``, None where it has none. ``record`` is None for a call without one; ``alike``
        is then a recorded call from which its peers' pace may be taken."""
        ...

    def batch(self, works: list[Work], device: torch.device) -> Work:
        """The Work of a coalescing batch whose calls have ``works``."""
        ...

    def before_wait(self, work: Work) -> None:
        """The program waits for ``work``."""
        ...

    def before_wait_tensor(self, tensor: torch.Tensor) -> None:
        """The program waits for the functional collective that ``tensor`` is a result of."""
        ...

    def close(self) -> None:
        """The replay is over. Idempotent."""
        ...


class AtOnce:
    """Results are there when the call returns."""

    def __init__(self) -> None:
        self.times: Counter[str] = Counter()

    def batch(self, works: list[Work], device: torch.device) -> Work:
        """All of them are over."""
        return completed_work([], device)

    def before_wait(self, work: Work) -> None:
        """Nothing to wait for."""

    def before_wait_tensor(self, tensor: torch.Tensor) -> None:
        """Nothing to wait for."""

    def close(self) -> None:
        """Nothing is left over."""

    def enter(self) -> int:
        """No time is kept."""
        return 0

    def deliver(
        self,
        call: Call,
        interned: Interned,
        record: CallRecord | None,
        fill: Fill,
        entered_ns: int,
        alike: CallRecord | None = None,
    ) -> Work | None:
        """See ``Delivery``."""
        self.times[TimeSource.NONE] += 1
        fill()
        return finished(call, record)


def finished(call: Call, record: CallRecord | None) -> Work | None:
    """The Work of a call whose outputs are written."""
    if call.operator.returns is Returns.NOTHING:
        return None
    if not call.is_async and call.device_type == "cpu":
        return FINISHED
    if call.operator.name == "recv_any_source_":
        source = record.completion.src_rank if record and record.completion else 0
        return AnySourceWork(lambda _: source, lambda: True)
    return completed_work(call.result, call.device)
