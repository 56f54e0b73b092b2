"""One clock for all hosts, told from the collectives themselves.

Ranks of a host share CLOCK_MONOTONIC. Between hosts, a collective that all its ranks wait for ends
within a few microseconds on all of them: the difference of its recorded ends is the difference of the
clocks. Offset and drift are a line through many such differences, fitted by medians so that late ends
do not pull it (Theil's incomplete method: the median slope over pairs half the samples apart).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ranklens_core.schema import RankRecord
from ranklens_core.timing.join import ROOTED_OPS, Joined, join
from ranklens_core.timing.ranklog import NO_TIME, Bool, Int64, RankLog, read_logs
from ranklens_core.trace import Trace

SAME_CLOCK_NS = 1_000_000_000
"""Two ranks of one host name whose boot times (wall clock less monotonic) differ by more do not share a
clock: they are on hosts of the same name."""

SAMPLES_FOR_DRIFT = 16
"""From fewer differences no drift is told."""

STANDARD_ERRORS = 3.0
"""A drift below so many standard errors is not told from none, and taken as none."""

MAD_TO_SIGMA = 1.4826
"""Standard deviation of a normal distribution over its median absolute deviation."""

MEDIAN_TO_MEAN_ERROR = 1.2533
"""Standard error of a median over that of a mean, normal distribution: sqrt(pi / 2)."""

Float64 = npt.NDArray[np.float64]


@dataclass(frozen=True)
class HostClock:
    """How a host's clock relates to the reference host's.

    ``reference time = t + offset_ns + drift * (t - base_ns)``, t and ``base_ns`` in the host's own ns.
    ``error_ns`` is how far one collective's ends typically scatter about that (one standard
    deviation, summed over the hosts in between); what all ends of a host have in common, such as a
    root that is always first, it cannot show. None where there was no collective to tell from.
    ``source`` is ``reference``, ``collectives`` or ``realtime`` (the wall clocks at the start, no drift).
    """

    host: str
    ranks: tuple[int, ...]
    source: str
    offset_ns: int = 0
    drift: float = 0.0
    base_ns: int = 0
    samples: int = 0
    error_ns: int | None = 0

    def convert(self, times_ns: Int64) -> Int64:
        """``times_ns`` of this host in the reference host's clock."""
        if self.drift == 0.0:
            return times_ns + self.offset_ns
        moved: Int64 = np.rint((times_ns - self.base_ns) * self.drift).astype(np.int64)
        return times_ns + self.offset_ns + moved


@dataclass(frozen=True)
class ClockAlignment:
    """The clocks of all hosts of a run; the first is the reference."""

    clocks: tuple[HostClock, ...]
    _of_rank: dict[int, HostClock] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        of_rank = {rank: clock for clock in self.clocks for rank in clock.ranks}
        object.__setattr__(self, "_of_rank", of_rank)

    @property
    def is_identity(self) -> bool:
        """Whether all ranks share one clock."""
        return len(self.clocks) <= 1

    @property
    def error_ns(self) -> int | None:
        """The largest error of any host; None if one has no known error."""
        errors = [clock.error_ns for clock in self.clocks]
        return None if None in errors else max((error for error in errors if error is not None), default=0)

    def clock_of(self, rank: int) -> HostClock:
        """The clock of ``rank``; KeyError if it was not recorded."""
        return self._of_rank[rank]

    def apply(self, logs: Sequence[RankLog]) -> list[RankLog]:
        """The logs in the reference clock; the same objects where all share one."""
        if self.is_identity:
            return list(logs)
        return [log.with_clock(self.clock_of(log.rank).convert) for log in logs]


def join_trace(trace: Trace) -> tuple[Joined, ClockAlignment]:
    """All calls of a trace joined, in one clock; errors as reading the trace raises them."""
    logs = read_logs(trace)
    joined = join(logs)
    alignment = align(joined, trace.ranks)
    return (joined if alignment.is_identity else join(alignment.apply(logs))), alignment


def align(joined: Joined, records: Mapping[int, RankRecord]) -> ClockAlignment:
    """Align the clocks of the hosts of ``joined``'s ranks, whose ``records`` are given by rank."""
    hosts = _hosts(joined, records)
    if not hosts:
        return ClockAlignment(())
    found = {0: HostClock(*hosts[0], source="reference")}
    differences = _differences(joined, hosts)
    # nearest hosts first: each host in between adds its error
    reached = [0]
    for parent in reached:
        links = [(len(ends), pair) for pair, ends in differences.items() if parent in pair]
        for _, pair in sorted(links, key=lambda link: (-link[0], link[1])):
            child = pair[0] if pair[1] == parent else pair[1]
            if child not in found:
                own, theirs = differences[pair].T if child == pair[0] else differences[pair].T[::-1]
                found[child] = _behind(found[parent], _fit(*hosts[child], own, theirs))
                reached.append(child)
    return ClockAlignment(
        tuple(
            found.get(number) or _from_wall_clock(hosts[0], hosts[number], records)
            for number in range(len(hosts))
        )
    )


def _hosts(joined: Joined, records: Mapping[int, RankRecord]) -> list[tuple[str, tuple[int, ...]]]:
    """Each clock's host name and ranks; the first has the lowest rank."""
    ranks = [log.rank for log in joined.logs]
    boots = sorted((records[rank].host, _boot_ns(records[rank]), rank) for rank in ranks)
    hosts: list[tuple[str, list[int]]] = []
    last: tuple[str, int] | None = None
    for host, boot_ns, rank in boots:
        if last is None or host != last[0] or boot_ns - last[1] > SAME_CLOCK_NS:
            hosts.append((host, []))
        hosts[-1][1].append(rank)
        last = (host, boot_ns)
    return sorted(((host, tuple(sorted(of_host))) for host, of_host in hosts), key=lambda item: item[1])


def _boot_ns(record: RankRecord) -> int:
    return record.realtime_ns - record.monotonic_ns


def _differences(joined: Joined, hosts: list[tuple[str, tuple[int, ...]]]) -> dict[tuple[int, int], Int64]:
    """For each pair of hosts, lower first, the ends of the calls they shared: (calls, 2) in own clocks.

    A host's end is the earliest of its ranks': what delays it there is a busy core, never the call.
    Calls of more than two hosts pair the lowest host with each other one.
    """
    if len(hosts) < 2:
        return {}
    host_of = {rank: number for number, (_, ranks) in enumerate(hosts) for rank in ranks}
    rows = joined.members[_tells(joined)[joined.members] & (joined.end_ns[joined.members] != NO_TIME)]
    host = np.array([host_of[rank] for rank in joined.rank[rows].tolist()], np.int64)
    exchange, end = joined.exchange[rows], joined.end_ns[rows]
    order = np.lexsort((end, host, exchange))
    exchange, host, end = exchange[order], host[order], end[order]
    earliest = np.ones(len(rows), bool)
    earliest[1:] = (exchange[1:] != exchange[:-1]) | (host[1:] != host[:-1])
    exchange, host, end = exchange[earliest], host[earliest], end[earliest]
    first = np.ones(len(exchange), bool)
    first[1:] = exchange[1:] != exchange[:-1]
    lowest = np.flatnonzero(first)[np.cumsum(first) - 1] if len(first) else np.zeros(0, np.int64)
    others = np.flatnonzero(~first)
    pairs = host[lowest[others]] * len(hosts) + host[others]
    return {
        (int(pair) // len(hosts), int(pair) % len(hosts)): np.stack(
            [end[lowest[others[pairs == pair]]], end[others[pairs == pair]]], axis=1
        )
        for pair in np.unique(pairs)
    }


def _tells(joined: Joined) -> Bool:
    """Which rows are of calls that end together on all ranks: no root, no uneven splits."""
    parts = [
        np.array(
            [
                s.op.removesuffix("_coalesced") not in ROOTED_OPS
                and len(set(s.in_split_sizes)) <= 1
                and len(set(s.out_split_sizes)) <= 1
                for s in log.signatures
            ],
            bool,
        )[log.signature]
        for log in joined.logs
    ]
    tells: Bool = np.concatenate([np.zeros(0, bool), *parts])
    return tells & ~joined.is_message[joined.exchange]


def _fit(host: str, ranks: tuple[int, ...], own_ns: Int64, other_ns: Int64) -> HostClock:
    """The clock in which ``own_ns`` were read, against that of ``other_ns``."""
    order = np.argsort(own_ns, kind="stable")
    own_ns, other_ns = own_ns[order], other_ns[order]
    base_ns, guess_ns = int(own_ns[len(own_ns) // 2]), int((other_ns - own_ns)[len(own_ns) // 2])
    # small numbers from here on: floats hold ns since boot only to about a microsecond
    since = (own_ns - base_ns).astype(np.float64)
    ahead = (other_ns - own_ns - guess_ns).astype(np.float64)
    drift = _drift(since, ahead)
    offset = float(np.median(ahead - drift * since))
    scatter = float(np.median(np.abs(ahead - drift * since - offset))) * MAD_TO_SIGMA
    return HostClock(
        host=host,
        ranks=ranks,
        source="collectives",
        offset_ns=guess_ns + round(offset),
        drift=drift,
        base_ns=base_ns,
        samples=len(own_ns),
        error_ns=int(np.ceil(scatter)),
    )


def _drift(since: Float64, ahead: Float64) -> float:
    """The slope of ``ahead`` over ``since`` (ascending), 0.0 where it cannot be told from none."""
    half = len(since) // 2
    run = since[half : 2 * half] - since[:half]
    if len(since) < SAMPLES_FOR_DRIFT or not np.all(run > 0):
        return 0.0
    slopes = (ahead[half : 2 * half] - ahead[:half]) / run
    slope = float(np.median(slopes))
    scatter = float(np.median(np.abs(slopes - slope))) * MAD_TO_SIGMA
    standard_error = scatter * MEDIAN_TO_MEAN_ERROR / float(np.sqrt(half))
    return slope if abs(slope) > STANDARD_ERRORS * standard_error else 0.0


def _behind(parent: HostClock, child: HostClock) -> HostClock:
    """``child``, known against ``parent``, against the reference."""
    base = np.array([child.base_ns], np.int64)
    assert child.error_ns is not None  # only hosts reached by collectives are parents or children
    assert parent.error_ns is not None
    return HostClock(
        host=child.host,
        ranks=child.ranks,
        source=child.source,
        offset_ns=int((parent.convert(child.convert(base)) - base)[0]),
        drift=(1.0 + parent.drift) * (1.0 + child.drift) - 1.0,
        base_ns=child.base_ns,
        samples=child.samples,
        error_ns=parent.error_ns + child.error_ns,
    )


def _from_wall_clock(
    reference: tuple[str, tuple[int, ...]],
    host: tuple[str, tuple[int, ...]],
    records: Mapping[int, RankRecord],
) -> HostClock:
    first, own = records[reference[1][0]], records[host[1][0]]
    offset_ns = _boot_ns(own) - _boot_ns(first)
    return HostClock(*host, source="realtime", offset_ns=offset_ns, error_ns=None)
