"""Peak memory by step, and what of it is RankLens' own.

On a GPU it is what torch's caching allocator had allocated at most. On the CPU torch counts nothing (its
allocator is malloc), so it is the process's highest resident set, which the kernel keeps and resets for
us: all of the process, interpreter and libraries included.
"""

from __future__ import annotations

import re
import resource
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch

from ranklens_core.cpu_cuda import is_installed as cuda_is_stand_in
from ranklens_core.schema import GroupRecord, Step
from ranklens_core.verdict import CommBuffers, MemoryResult, MemoryStep

NCCL_CONNECTION_BYTES = (8 * 512 * 8 * 16) + (120 * 640 * 8 * 8) + (1 << 22)
"""What a channel buffers for its incoming connection: the defaults of LL, LL128 and Simple, in this order
(``DEFAULT_LL_BUFFSIZE``, ``DEFAULT_LL128_BUFFSIZE``, ``DEFAULT_BUFFSIZE`` of nccl/src/init.cc)."""

NCCL_CHANNELS = 16
"""Channels assumed of a communicator; NCCL takes 2 to 32, by topology."""


class PeakCounter(Protocol):
    """Something that remembers the most memory since it was last reset."""

    name: str

    def reset(self) -> None:
        """Forget what was."""
        ...

    def peak_bytes(self) -> int:
        """The most since the last reset."""
        ...


class CudaPeak:
    """Allocated by torch on the current device."""

    name = "allocated by torch on the GPU"

    def reset(self) -> None:
        torch.cuda.reset_peak_memory_stats()

    def peak_bytes(self) -> int:
        return int(torch.cuda.max_memory_allocated())


class ResidentPeak:
    """Resident memory of this process (VmHWM; proc(5), ``/proc/self/clear_refs``)."""

    def __init__(self, proc: Path = Path("/proc/self")) -> None:
        self._status = proc / "status"
        self._clear_refs = proc / "clear_refs"
        self.name = "resident"
        self.reset()

    def reset(self) -> None:
        """Where that cannot be, ``name`` says so: each peak is then the highest so far."""
        try:
            self._clear_refs.write_text("5")
        except OSError:
            self.name = "resident, highest so far"

    def peak_bytes(self) -> int:
        if self._status.exists():
            return _field(self._status.read_text(), "VmHWM")
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def private_bytes(self) -> int:
        """Resident memory that belongs to no file, now; 0 where the system does not tell."""
        return _field(self._status.read_text(), "RssAnon") if self._status.exists() else 0


def _field(status: str, name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB", status, re.MULTILINE)
    return int(found[1]) * 1024 if found else 0


class MemoryWatch:
    """Takes the peak of each step of a replay. Make it before the trace is read: what this then takes is
    RankLens' own, as are the recorded values of the call that is being answered.
    """

    def __init__(self) -> None:
        self._resident = ResidentPeak()
        self._counter: PeakCounter = self._resident
        self._begin_bytes = self._resident.private_bytes()
        self._tables_bytes = 0
        self._values_bytes = 0
        self._set_up_bytes = 0
        self._steps: list[MemoryStep] = []

    def ready(self) -> None:
        """RankLens has read what it needs; the program begins."""
        self._tables_bytes = max(0, self._resident.private_bytes() - self._begin_bytes)
        self._resident.reset()

    def restored(self, nbytes: int) -> None:
        """A call is answered with so many bytes of recorded values, which are let go of then."""
        self._values_bytes = max(self._values_bytes, nbytes)

    def begin(self) -> None:
        """The first step begins."""
        if torch.cuda.is_available() and torch.cuda.is_initialized() and not cuda_is_stand_in():
            self._counter = CudaPeak()
        self._set_up_bytes = self._counter.peak_bytes()
        self._counter.reset()

    def end(self, step: Step) -> None:
        """``step`` is over."""
        self._steps.append(MemoryStep(index=step.index, peak_bytes=self._counter.peak_bytes()))
        self._counter.reset()

    def result(self, groups: Sequence[GroupRecord]) -> MemoryResult:
        """What was seen; ``groups`` are the job's process groups."""
        on_host = self._counter is self._resident
        return MemoryResult(
            counter=self._counter.name,
            set_up_bytes=self._set_up_bytes,
            steps=tuple(self._steps),
            # on a GPU the values go from the mapped file into the program's own tensors
            own_tables_bytes=self._tables_bytes if on_host else 0,
            own_values_bytes=self._values_bytes if on_host else 0,
            comm_buffers=comm_buffers(groups),
        )


def comm_buffers(groups: Sequence[GroupRecord]) -> CommBuffers:
    """What the real job's communication library holds for ``groups`` besides: a constant, not measured."""
    nccl = [group for group in groups if "nccl" in group.backend and len(group.ranks) > 1]
    nbytes = len(nccl) * NCCL_CHANNELS * NCCL_CONNECTION_BYTES
    if not nccl:
        return CommBuffers(nbytes=0, basis="no NCCL communicator; other libraries' buffers are not counted")
    basis = (
        f"{len(nccl)} NCCL communicators, {NCCL_CHANNELS} channels assumed of each, one ring, buffers of "
        f"{NCCL_CONNECTION_BYTES / 2**20:.1f} MiB a channel (NCCL's defaults)"
    )
    return CommBuffers(nbytes=nbytes, basis=basis)
