"""A call that failed when it was recorded, in a program that coped: it fails again, the same way."""

from __future__ import annotations

import weakref
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Work

from ranklens_core.c10d.call import Call
from ranklens_core.c10d.work import AnySourceWork, failed_work, pending_work, storage_of
from ranklens_core.check.structure import describe
from ranklens_core.errors import TraceIncompleteError
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
    """Whether the call failed, or never ended, and the program came to a good end all the same."""
    failed = record.completion is None or bool(record.completion.error)
    return failed and rank.exit_status == 0


class RecordedFailures:
    """Makes calls fail where their records did: at once, or in their Work."""

    def __init__(self) -> None:
        self._errors: weakref.WeakKeyDictionary[Work, Exception] = weakref.WeakKeyDictionary()
        self._errors_of_storages: dict[int, Exception] = {}

    def fail(self, call: Call, record: CallRecord) -> Work:
        """Raise the recorded error if the recorded call blocked, else a Work that has failed with it.

        A call that never ended (a receive posted in vain) gets a Work that never does.
        """
        if record.completion is None:
            return self._pending(call, record)
        error = recorded_error(record.completion.error)
        if record.completion.return_ns:
            raise error
        if call.operator.name == "recv_any_source_":
            return AnySourceWork(partial(_raise, error), lambda: True)
        return self._keep(failed_work(error, call.device), call, error)

    def _pending(self, call: Call, record: CallRecord) -> Work:
        error = TraceIncompleteError(
            f"{describe(record.signature)} of rank {record.rank} had not ended when the recorded program "
            "did: there is nothing to wait for."
        )
        if call.operator.name == "recv_any_source_":
            return AnySourceWork(partial(_raise, error), lambda: False)
        return self._keep(pending_work(call.device), call, error)

    def _keep(self, work: Work, call: Call, error: Exception) -> Work:
        self._errors[work] = error
        for tensor in call.outputs:
            self._errors_of_storages[storage_of(tensor)] = error
        return work

    def of(self, work: Work) -> Exception | None:
        """What waiting for ``work`` raises; torch itself does not for a Work made from a future."""
        return self._errors.get(work)

    def of_tensor(self, tensor: torch.Tensor) -> Exception | None:
        """What waiting for the functional collective that makes ``tensor`` raises, once."""
        return self._errors_of_storages.pop(storage_of(tensor), None)


def _raise(error: Exception, timeout: timedelta) -> int:
    raise error
