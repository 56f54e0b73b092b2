"""Transfer time from measured sizes: log-log interpolation, and what it is worth."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median

from ranklens_core.errors import UsageError


@dataclass(frozen=True)
class SizeTable:
    """Measured (message bytes, transfer ns), ascending, one time a size.

    Between two sizes: a straight line in log(bytes), log(time). Below the smallest: its time, since a
    smaller message still pays the latency. Above the largest: the bandwidth between the two largest sizes,
    and never less than nothing for the bytes in excess.
    """

    sizes: tuple[int, ...]
    times_ns: tuple[float, ...]

    @classmethod
    def from_points(cls, points: Iterable[tuple[int, float]]) -> SizeTable:
        """Build from (bytes, ns) in any order; repeated sizes become their median. Raises UsageError."""
        by_size: dict[int, list[float]] = defaultdict(list)
        for size, time_ns in points:
            if size < 0 or not math.isfinite(time_ns) or time_ns <= 0:
                raise UsageError(f"not a measurement: {size} bytes in {time_ns} ns")
            by_size[size].append(time_ns)
        if not by_size:
            raise UsageError("a table of measurements needs at least one (bytes, ns) point")
        sizes = tuple(sorted(by_size))
        return cls(sizes, tuple(median(by_size[size]) for size in sizes))

    def covers(self, size: int) -> bool:
        return self.sizes[0] <= size <= self.sizes[-1]

    def time_ns(self, size: int) -> float:
        """Transfer time of ``size`` bytes, in ns."""
        if size <= self.sizes[0]:
            return self.times_ns[0]
        if size > self.sizes[-1]:
            return self._beyond(size)
        upper = bisect_left(self.sizes, size)
        if self.sizes[upper] == size:
            return self.times_ns[upper]
        # Zero bytes have no logarithm: they sit at one byte.
        x0, x1 = math.log(max(self.sizes[upper - 1], 1)), math.log(self.sizes[upper])
        y0, y1 = math.log(self.times_ns[upper - 1]), math.log(self.times_ns[upper])
        weight = (math.log(size) - x0) / (x1 - x0) if x1 > x0 else 1.0
        return math.exp(y0 + weight * (y1 - y0))

    def _beyond(self, size: int) -> float:
        last_size, last_time = self.sizes[-1], self.times_ns[-1]
        if len(self.sizes) == 1:
            # One point cannot tell latency from bandwidth: all of it is taken as bandwidth.
            return last_time * size / max(last_size, 1)
        slope = (last_time - self.times_ns[-2]) / (last_size - self.sizes[-2])
        return last_time + max(slope, 0.0) * (size - last_size)

    def held_out_error_pct(self) -> float | None:
        """Mean error when each inner size is predicted from the others, in percent; None below 3 sizes."""
        errors = []
        for i in range(1, len(self.sizes) - 1):
            others = SizeTable(
                self.sizes[:i] + self.sizes[i + 1 :], self.times_ns[:i] + self.times_ns[i + 1 :]
            )
            errors.append(abs(others.time_ns(self.sizes[i]) / self.times_ns[i] - 1))
        return 100 * sum(errors) / len(errors) if errors else None
