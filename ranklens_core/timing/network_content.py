"""A network as text for a trace: the description and all measurements, no names of files."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ranklens_core.errors import TraceDamagedError, UsageError
from ranklens_core.timing.estimate import Estimator
from ranklens_core.timing.nccl_tests import Measurement, read_nccl_tests_log
from ranklens_core.timing.network import NetworkDescription
from ranklens_core.timing.typed_yaml import POSITIVE, build

WHERE = Path("run.json, network_content")
"""Where a wrong value is said to be."""


@dataclass(frozen=True)
class _Measured:
    """A line of the user's nccl-tests logs."""

    op: str
    n_ranks: int = dataclasses.field(metadata=POSITIVE)
    n_nodes: int = dataclasses.field(metadata=POSITIVE)
    message_bytes: int = dataclasses.field(metadata={"at_least": 0})
    transfer_ns: int = dataclasses.field(metadata=POSITIVE)
    dtype: str | None = None


@dataclass(frozen=True)
class _Content:
    network: NetworkDescription
    measurements: tuple[_Measured, ...]


def network_content(network: NetworkDescription) -> str:
    """``network`` as JSON, the user's nccl-tests logs by what they measured.

    Raises UsageError for a log that cannot be read.
    """
    measured = [
        _Measured(one.op, one.n_ranks, one.n_nodes, one.message_bytes, one.transfer_ns, one.dtype)
        for log in network.nccl_tests_logs
        for one in read_nccl_tests_log(log.path, op=log.op)
    ]
    content = _Content(dataclasses.replace(network, nccl_tests_logs=()), tuple(measured))
    return json.dumps(dataclasses.asdict(content))


def recorded_estimator(content: str, *, measurements: Iterable[Measurement] = ()) -> Estimator:
    """The estimator of a network that ``network_content`` wrote; ``measurements`` join the network's own.

    Raises TraceDamagedError for anything else: a trace is a stranger's data, every value is checked, and no
    file is opened.
    """
    try:
        values = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise TraceDamagedError(f"{WHERE}: not JSON: {error}. Copy the trace again.") from error
    try:
        built = build(_Content, values, WHERE)
        if built.network.nccl_tests_logs:
            raise UsageError("it names files of measurements, which a trace must not")
        measured = [Measurement(**dataclasses.asdict(one)) for one in built.measurements]
        return Estimator(built.network, measurements=[*measured, *measurements])
    except UsageError as error:
        raise TraceDamagedError(f"The trace's network is not one: {error}. Copy the trace again.") from error
