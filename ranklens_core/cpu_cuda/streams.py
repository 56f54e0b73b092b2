"""CUDA streams and events on a machine where everything is done when the call returns."""

from __future__ import annotations

import itertools
import threading
import time
from typing import ClassVar

import torch

from ranklens_core.errors import UsageError

_DEVICE = torch.device("cuda", 0)


class Event:
    """``torch.cuda.Event``: recorded means reached, as the CPU has finished whatever was issued before."""

    def __init__(
        self,
        enable_timing: bool = False,
        blocking: bool = False,
        interprocess: bool = False,
        external: bool = False,
    ) -> None:
        self._enable_timing = enable_timing
        self._recorded_ns: int | None = None
        self.device = _DEVICE
        self.cuda_event = id(self)

    def record(self, stream: Stream | None = None) -> None:
        self._recorded_ns = time.monotonic_ns()

    def wait(self, stream: Stream | None = None) -> None:
        pass

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end_event: Event) -> float:
        """Milliseconds from this event to ``end_event``.

        Raises:
            UsageError: one of them was not recorded, or made without ``enable_timing=True``; CUDA raises too.
        """
        return (end_event._timestamp_ns() - self._timestamp_ns()) / 1e6

    def _timestamp_ns(self) -> int:
        if not self._enable_timing or self._recorded_ns is None:
            raise UsageError(
                "torch.cuda.Event.elapsed_time needs two recorded events made with enable_timing=True."
            )
        return self._recorded_ns


class Stream:
    """``torch.cuda.Stream``: an identity and an order that always holds."""

    _ids: ClassVar[itertools.count[int]] = itertools.count(1)

    def __init__(self, device: object = None, priority: int = 0, stream_id: int | None = None) -> None:
        self.device = _DEVICE
        self.priority = priority
        self.stream_id = next(self._ids) if stream_id is None else stream_id
        self.cuda_stream = self.stream_id
        self.device_index = 0
        self.device_type = 1  # c10::DeviceType::CUDA

    @staticmethod
    def priority_range() -> tuple[int, int]:
        """Least and greatest priority, in the order CUDA gives them: all are equal here."""
        return (0, 0)

    def wait_event(self, event: Event) -> None:
        event.wait(self)

    def wait_stream(self, stream: Stream) -> None:
        self.wait_event(stream.record_event())

    def record_event(self, event: Event | None = None) -> Event:
        if event is None:
            event = Event()
        event.record(self)
        return event

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


class ExternalStream(Stream):
    """``torch.cuda.ExternalStream``: keeps the handle it was given."""

    def __init__(self, stream_ptr: int, device: object = None) -> None:
        super().__init__(device)
        self.cuda_stream = stream_ptr

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and self.cuda_stream == other.cuda_stream

    def __hash__(self) -> int:
        return hash(self.cuda_stream)


class CurrentStreams(threading.local):
    """The current stream of each thread, and the ``torch.cuda`` functions about it."""

    def __init__(self, default: Stream) -> None:
        self._default = default
        self._current = default

    def current_stream(self, device: object = None) -> Stream:
        return self._current

    def default_stream(self, device: object = None) -> Stream:
        return self._default

    def set_stream(self, stream: Stream | None) -> None:
        if stream is not None:
            self._current = stream


def replacements() -> dict[str, object]:
    """Stand-ins by their name in ``torch.cuda``; its `stream` and `StreamContext` work on top of these."""
    streams = CurrentStreams(Stream(stream_id=0))  # CUDA's default stream is number 0 too
    return {
        "Event": Event,
        "Stream": Stream,
        "ExternalStream": ExternalStream,
        "current_stream": streams.current_stream,
        "default_stream": streams.default_stream,
        "set_stream": streams.set_stream,
        "get_stream_from_external": ExternalStream,
        "synchronize": lambda device=None: None,
    }
