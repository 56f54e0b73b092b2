"""One clock for all hosts."""

from __future__ import annotations

import numpy as np
import pytest
from timing_samples import LogBuilder

from ranklens_core.schema import RankRecord
from ranklens_core.timing.align import ClockAlignment, align
from ranklens_core.timing.join import join
from ranklens_core.timing.ranklog import RankLog

HOUR_NS = 3600 * 10**9


def record(rank: int, host: str, boot_ns: int = 0) -> RankRecord:
    return RankRecord(
        rank=rank,
        host=host,
        pid=1,
        local_rank=0,
        has_values=False,
        value_steps=None,
        complete=True,
        exit_status=0,
        failure="",
        monotonic_ns=10**9,
        realtime_ns=10**9 + boot_ns,
        groups=(),
        steps=(),
        environment=(),
        printed=(),
    )


def logs_of(
    clocks: dict[int, tuple[int, float]],
    groups: dict[str, tuple[int, ...]],
    *,
    calls: int = 200,
    noise_ns: int = 0,
    every_ns: int = 10**8,
) -> list[RankLog]:
    """A collective of each group every so often; each rank reads true time as offset + (1 + drift) * t."""
    random = np.random.default_rng(7)
    builders = {rank: LogBuilder(rank, groups) for rank in clocks}
    for call in range(calls):
        for place, (group, ranks) in enumerate(groups.items()):
            true_ns = HOUR_NS + call * every_ns + place * 10**6
            for rank in ranks:
                offset, drift = clocks[rank]
                end = true_ns + int(random.exponential(noise_ns)) if noise_ns else true_ns
                read = [offset + t + round(drift * t) for t in (end - 50_000, end)]
                builders[rank].call("all_reduce", group, read[0], read[1])
    return [builder.build() for builder in builders.values()]


def misfit_ns(logs: list[RankLog], alignment: ClockAlignment) -> int:
    """The largest difference between ends of a collective after alignment."""
    joined = join(alignment.apply(logs))
    ends = joined.end_ns[joined.members]
    latest = np.maximum.reduceat(ends, joined.offsets[:-1])
    return int((latest - np.minimum.reduceat(ends, joined.offsets[:-1])).max())


def test_one_host_needs_nothing() -> None:
    logs = logs_of({0: (0, 0.0), 1: (0, 0.0)}, {"0,1": (0, 1)}, calls=3)
    alignment = align(join(logs), {0: record(0, "a"), 1: record(1, "a", boot_ns=10**6)})
    assert alignment.is_identity
    assert alignment.error_ns == 0
    assert all(new is old for new, old in zip(alignment.apply(logs), logs, strict=True))


def test_an_offset_without_noise_is_found_exactly() -> None:
    logs = logs_of({0: (0, 0.0), 1: (-123_456_789, 0.0)}, {"0,1": (0, 1)})
    alignment = align(join(logs), {0: record(0, "a"), 1: record(1, "b")})
    clock = alignment.clock_of(1)
    assert (clock.offset_ns, clock.drift, clock.error_ns) == (123_456_789, 0.0, 0)
    assert (clock.source, clock.samples) == ("collectives", 200)
    assert misfit_ns(logs, alignment) == 0


def test_drift_is_found_through_noise() -> None:
    drift = 20e-6  # 20 us a second
    logs = logs_of({0: (0, 0.0), 1: (5_000_000, drift)}, {"0,1": (0, 1)}, noise_ns=3_000)
    alignment = align(join(logs), {0: record(0, "a"), 1: record(1, "b")})
    clock = alignment.clock_of(1)
    assert clock.drift == pytest.approx(-drift, rel=0.01)
    # at the middle of the run: within a tenth of the noise of one call
    true_ns = HOUR_NS + 10 * 10**9
    read = np.array([5_000_000 + true_ns + round(drift * true_ns)], np.int64)
    assert abs(int(clock.convert(read)[0]) - true_ns) < 600
    assert clock.error_ns is not None
    assert 1_000 < clock.error_ns < 10_000


def test_a_drift_that_noise_could_be_is_none() -> None:
    logs = logs_of({0: (0, 0.0), 1: (0, 0.0)}, {"0,1": (0, 1)}, noise_ns=50_000, every_ns=10**6)
    assert align(join(logs), {0: record(0, "a"), 1: record(1, "b")}).clock_of(1).drift == 0.0


def test_late_ends_on_one_host_do_not_pull_the_line() -> None:
    logs = logs_of({0: (0, 0.0), 1: (1000, 0.0)}, {"0,1": (0, 1)})
    logs[1].end_ns[::7] += 30_000_000  # a stalled core
    clock = align(join(logs), {0: record(0, "a"), 1: record(1, "b")}).clock_of(1)
    assert (clock.offset_ns, clock.drift) == (-1000, 0.0)


def test_a_host_is_reached_over_another() -> None:
    groups = {"0,1": (0, 1), "1,2": (1, 2)}
    logs = logs_of({0: (0, 0.0), 1: (-7_000, 30e-6), 2: (40_000, -10e-6)}, groups)
    alignment = align(join(logs), {rank: record(rank, f"host{rank}") for rank in range(3)})
    assert misfit_ns(logs, alignment) <= 3
    assert alignment.clock_of(2).source == "collectives"


def test_hosts_without_a_common_call_keep_their_wall_clocks() -> None:
    logs = logs_of({0: (0, 0.0), 1: (0, 0.0)}, {"0": (0,), "1": (1,)}, calls=3)
    alignment = align(join(logs), {0: record(0, "a", boot_ns=100), 1: record(1, "b", boot_ns=350)})
    clock = alignment.clock_of(1)
    assert (clock.source, clock.offset_ns, clock.error_ns) == ("realtime", 250, None)
    assert alignment.error_ns is None


def test_two_hosts_of_one_name_are_two() -> None:
    logs = logs_of({0: (0, 0.0), 1: (-(10**10), 0.0)}, {"0,1": (0, 1)})
    records = {0: record(0, "localhost"), 1: record(1, "localhost", boot_ns=10**10)}
    alignment = align(join(logs), records)
    assert [clock.ranks for clock in alignment.clocks] == [(0,), (1,)]
    assert misfit_ns(logs, alignment) == 0


def test_rooted_and_uneven_calls_and_messages_tell_nothing() -> None:
    groups = {"0,1": (0, 1)}
    builders = [LogBuilder(rank, groups) for rank in (0, 1)]
    for builder in builders:
        builder.call("broadcast", "0,1", 0, 10 + 500 * builder.rank, peer=0)
        builder.call("all_to_all_single", "0,1", 600, 700 * builder.rank, in_split_sizes=(1, 2))
    builders[0].call("send", "0,1", 800, 900, peer=1)
    builders[1].call("recv", "0,1", 800, 950, peer=0)
    logs = [builder.build() for builder in builders]
    alignment = align(join(logs), {0: record(0, "a"), 1: record(1, "b")})
    assert alignment.clock_of(1).source == "realtime"


def test_nothing_recorded() -> None:
    assert align(join([]), {}).is_identity
