"""Which rank failed first: cause told from consequence.

When a rank ends, the others soon fail too, with reset connections and timeouts, and the launcher may hear of
them first. So a failure that looks like the loss of a peer is blamed only if no other shows up for a moment.
"""

from __future__ import annotations

import re
import signal
import struct
from dataclasses import dataclass, field

# A killed process closes its sockets before it can be waited for; by milliseconds, on a loaded machine more.
_SETTLE_NS = 250_000_000

_PEER_LOSS_TYPES = {"ConnectionError", "DistBackendError", "DistNetworkError", "DistStoreError"}
_PEER_LOSS_CARRIERS = {"RuntimeError", "OSError", "EOFError"}
_PEER_LOSS_TEXT = re.compile(
    r"connection (was )?(reset|closed|refused|aborted)|broken pipe|socket|remote (peer|process)|by peer"
    r"|0 bytes|timed out|timeout|nccl",
    re.IGNORECASE,
)
# The runtime aborts on an exception in a thread of its own, which a lost peer causes too.
_PEER_LOSS_SIGNALS = (signal.SIGABRT, signal.SIGPIPE)


@dataclass(frozen=True)
class RankFailure:
    """A rank that failed. ``status`` is 128 + ``signum`` for one killed by a signal."""

    rank: int
    status: int
    signum: int | None = None

    def describe(self) -> str:
        """In words, for the rank that failed first."""
        if self.signum is None:
            return f"rank {self.rank} failed first: exit status {self.status}"
        return f"rank {self.rank} failed first: killed by signal {self.signum} ({signal_name(self.signum)})"


@dataclass(frozen=True)
class FailureReport:
    """What a failing rank tells the launcher before it prints its traceback; an atomic write to one pipe.

    ``peer_lost``: the exception looks like the consequence of another rank's end. ``time_ns`` is
    CLOCK_MONOTONIC.
    """

    rank: int
    time_ns: int
    status: int
    peer_lost: bool

    SIZE = 17

    def to_bytes(self) -> bytes:
        return struct.pack("<iqi?", self.rank, self.time_ns, self.status, self.peer_lost)

    @classmethod
    def from_bytes(cls, data: bytes) -> FailureReport:
        return cls(*struct.unpack("<iqi?", data))


@dataclass
class FirstFailure:
    """Collects failures until one can be blamed. All times are CLOCK_MONOTONIC, ns."""

    _suspects: list[tuple[bool, int, RankFailure]] = field(default_factory=list)
    decide_at_ns: int | None = None
    """When ``decide`` is to be asked again at the latest; None while nothing has failed."""

    def add_report(self, report: FailureReport, now_ns: int) -> None:
        """A rank told of its own failure."""
        self._add(report.peer_lost, report.time_ns, RankFailure(report.rank, report.status), now_ns)

    def add_end(self, rank: int, status: int, signum: int | None, now_ns: int) -> None:
        """A rank ended without a word: killed by a signal, or ``os._exit``."""
        self._add(signum in _PEER_LOSS_SIGNALS, now_ns, RankFailure(rank, status, signum), now_ns)

    def decide(self, now_ns: int, others_may_fail: bool) -> RankFailure | None:
        """The failure to blame, or None if there is none or its cause may still show."""
        if self.decide_at_ns is None:
            return None
        peer_lost, _, failure = min(self._suspects, key=lambda suspect: suspect[:2])
        if peer_lost and others_may_fail and now_ns < self.decide_at_ns:
            return None
        return failure

    def _add(self, peer_lost: bool, time_ns: int, failure: RankFailure, now_ns: int) -> None:
        self._suspects.append((peer_lost, time_ns, failure))
        if self.decide_at_ns is None:
            self.decide_at_ns = now_ns + _SETTLE_NS


def is_peer_loss(error: BaseException) -> bool:
    """Whether an exception, or one it was raised from, is what the end of another rank looks like."""
    seen = set[int]()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        if any(is_peer_loss_text(base.__name__, "") for base in type(link).__mro__):
            return True
        if isinstance(link, RuntimeError | OSError | EOFError) and _PEER_LOSS_TEXT.search(str(link)):
            return True
        link = link.__cause__ or link.__context__
    return False


def is_peer_loss_text(type_name: str, message: str) -> bool:
    """The same for an exception of which only the text is left."""
    if type_name in _PEER_LOSS_TYPES:
        return True
    return type_name in _PEER_LOSS_CARRIERS and _PEER_LOSS_TEXT.search(message) is not None


def signal_name(signum: int) -> str:
    return signal.Signals(signum).name if signum in set(signal.Signals) else "real-time"
