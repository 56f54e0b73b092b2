"""What a diagnosis looks at: every rank's log and how the rank ended, whatever recorded it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from ranklens_core.schema import GroupRecord, Signature
from ranklens_core.timing.join import Joined
from ranklens_core.timing.ranklog import RankLog

UInt64 = npt.NDArray[np.uint64]


class How(StrEnum):
    """How a rank's recording ended."""

    FINISHED = "finished"
    FAILED = "failed"
    KILLED = "killed"
    STOPPED = "recording stopped"
    DUMPED = "dumped"
    UNRECORDED = "not recorded"
    UNREADABLE = "unreadable"


@dataclass(frozen=True)
class RankState:
    """How the recording of a rank ended.

    ``alive_ns`` is the last time at which it is known what the rank had done; None if the log is all
    that it did: it ended, or its dump was taken while the job hung. ``waiting`` are indices of the calls
    that the program was inside of or waited for at the end, empty if that is not known. ``place`` is where
    in the program it was then, ``file:line function``. ``error`` is the exception it ended with
    (``Type: message``), ``peer_lost`` whether it is what the loss of another rank looks like.
    ``signal`` is the one that killed it (0: none, or not known), ``text`` says why there is no more.
    """

    rank: int
    how: How
    alive_ns: int | None = None
    exit_status: int | None = None
    error: str = ""
    error_site: str = ""
    peer_lost: bool = False
    signal: int = 0
    waiting: tuple[int, ...] = ()
    place: str = ""
    text: str = ""

    @property
    def is_over(self) -> bool:
        """Whether the program is known to make no more calls."""
        return self.how in (How.FINISHED, How.FAILED) or self.signal != 0

    @property
    def has_log(self) -> bool:
        return self.how not in (How.UNRECORDED, How.UNREADABLE)


@dataclass(frozen=True)
class Fingerprints:
    """64 bits of the content addresses of each call's inputs and outputs, 0 where values are not known."""

    inputs: UInt64
    outputs: UInt64


@dataclass(frozen=True)
class Job:
    """The ranks of a job. ``logs`` are sorted by rank, in one clock; ``states`` has every rank of the world.

    ``joined`` has all calls, one row each; ``failed`` the error text of rows whose call failed; ``values``
    is by rank, for those whose values were recorded. ``times`` says in words where times come from, ``notes``
    what else a reader should know.
    """

    source: str
    world_size: int
    joined: Joined
    states: Mapping[int, RankState]
    groups: Mapping[str, GroupRecord]
    failed: Mapping[int, str]
    values: Mapping[int, Fingerprints] = field(default_factory=dict)
    times: str = ""
    notes: tuple[str, ...] = ()

    @property
    def logs(self) -> tuple[RankLog, ...]:
        return self.joined.logs

    def index_of(self, row: int) -> int:
        """The index of a row in its rank's log."""
        first: int = self.joined.rows_of(int(self.joined.rank[row])).start
        return row - first

    def signature(self, row: int) -> Signature:
        """The signature of a row."""
        return self.joined.signature(row)

    def step(self, row: int) -> int:
        """The step of a row."""
        return int(self.joined.log_of(row).step[self.index_of(row)])

    def seq_id(self, row: int) -> int:
        """The ``seq_id`` of a row."""
        return int(self.joined.log_of(row).seq_id[self.index_of(row)])
