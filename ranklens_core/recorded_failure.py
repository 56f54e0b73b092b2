"""A call that failed when it was recorded, in a program that coped: it fails again, the same way."""

from __future__ import annotations

import weakref
from datetime import timedelta
from functools import partial

import torch.distributed as dist
from torch._C._distributed_c10d import Work

from ranklens_core.c10d.call import Call
from ranklens_core.c10d.work import AnySourceWork, failed_work
from ranklens_core.schema import CallRecord, RankRecord

RECORDED_ERRORS: dict[str, type[Exception]] = {
    error.__name__: error
    for error in (
        ValueError,
        TypeError,
        IndexError,
        NotImplementedError,
        dist.DistError,
        dist.DistBackendError,
        dist.DistNetworkError,
        dist.DistStoreError,
    )
}
"""What torch's collectives raise, by the name in the trace; anything else becomes a RuntimeError."""


def recorded_error(text: str) -> Exception:
    """The exception that ``CompletionRow.error`` (``Type: message``) tells of."""
    name, _, message = text.partition(": ")
    return RECORDED_ERRORS.get(name, RuntimeError)(message)


def was_survived(record: CallRecord, rank: RankRecord) -> bool:
    """Whether the call failed and the program coped: it came to a good end all the same."""
    failed = record.completion is not None and bool(record.completion.error)
    return failed and rank.exit_status == 0


class RecordedFailures:
    """Makes calls fail where their records did: at once, or in their Work."""

    def __init__(self) -> None:
        self._errors: weakref.WeakKeyDictionary[Work, Exception] = weakref.WeakKeyDictionary()

    def fail(self, call: Call, record: CallRecord) -> Work:
        """Raise the recorded error if the recorded call blocked, else a Work that has failed with it."""
        assert record.completion is not None
        error = recorded_error(record.completion.error)
        if record.completion.return_ns:
            raise error
        if call.operator.name == "recv_any_source_":
            return AnySourceWork(partial(_raise, error), lambda: True)
        work = failed_work(error, call.device)
        self._errors[work] = error
        return work

    def of(self, work: Work) -> Exception | None:
        """What waiting for ``work`` raises; torch itself does not for a Work made from a future."""
        return self._errors.get(work)


def _raise(error: Exception, timeout: timedelta) -> int:
    raise error
