"""Jobs for the tests of the diagnosis, made by hand from the logs of their ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from timing_samples import LogBuilder

from ranklens_core.diagnose import Diagnosis, diagnose_job
from ranklens_core.diagnose.job import Fingerprints, How, Job, RankState
from ranklens_core.schema import GroupRecord
from ranklens_core.timing.join import join

SECOND = 1_000_000_000
LATE = 60 * SECOND
"""When the ranks of a hung job are killed."""


class HandMade:
    """A job of ``world_size`` ranks: calls are added to its ``ranks`` (``LogBuilder``)."""

    def __init__(self, world_size: int, **groups: Sequence[int]) -> None:
        """``groups`` by key; ``world`` is always there."""
        self.world = tuple(range(world_size))
        known = {"world": self.world, **{key: tuple(ranks) for key, ranks in groups.items()}}
        self.groups = known
        self.ranks = [
            LogBuilder(rank, {key: of for key, of in known.items() if rank in of}) for rank in self.world
        ]
        self.states = {rank: RankState(rank, How.FINISHED, exit_status=0) for rank in self.world}
        self.failed: dict[tuple[int, int], str] = {}
        self._outputs: dict[tuple[int, int], int] = {}
        self._inputs: dict[tuple[int, int], int] = {}

    def all_reduce(self, ranks: Sequence[int] | None = None, **more: Any) -> None:
        """A completed all-reduce of ``ranks`` (all), from line 1 of train.py unless ``more`` says else."""
        for rank in self.world if ranks is None else ranks:
            self.call(rank, "all_reduce", **more)

    def call(
        self,
        rank: int,
        op: str,
        group: str = "world",
        *,
        line: int = 1,
        done: bool = True,
        output: int = 0,
        input: int = 0,
        at: int | None = None,
        **more: Any,
    ) -> int:
        """A call of ``rank``, 10 ns after its last; in flight unless ``done``. ``output`` and ``input`` stand
        for the values. Returns its index among the rank's calls."""
        builder = self.ranks[rank]
        index = len(builder._calls)
        start = 10 * index if at is None else at
        more = {
            "program_site": f"train.py:{line} main",
            "reduce_op": "sum" if op == "all_reduce" else "",
        } | more
        builder.call(op, group, start, start + 5 if done else None, **more)
        self._outputs[rank, index], self._inputs[rank, index] = output, input
        return index

    def killed(self, *ranks: int, alive_ns: int = LATE, **more: Any) -> None:
        """``ranks`` (all) were killed at ``alive_ns``."""
        for rank in ranks or self.world:
            self.states[rank] = RankState(rank, How.KILLED, alive_ns=alive_ns, **more)

    def failed_with(self, rank: int, error: str, **more: Any) -> None:
        """``rank`` ended with an exception."""
        self.states[rank] = RankState(
            rank,
            How.FAILED,
            exit_status=1,
            error=error,
            error_site="train.py:9 load",
            place="train.py:9 load",
            **more,
        )

    def job(self) -> Job:
        joined = join([builder.build() for builder in self.ranks if self.states[builder.rank].has_log])
        first = {log.rank: joined.rows_of(log.rank).start for log in joined.logs}
        return Job(
            source="hand-made",
            world_size=len(self.world),
            joined=joined,
            states=self.states,
            groups={
                key: GroupRecord(key=key, pg_name=key, pg_desc="", backend="gloo", ranks=ranks, role="")
                for key, ranks in self.groups.items()
            },
            failed={first[rank] + index: text for (rank, index), text in self.failed.items()},
            values=self._values(),
            times="by hand",
        )

    def diagnosis(self) -> Diagnosis:
        return diagnose_job(self.job(), "by-hand")

    def _values(self) -> Mapping[int, Fingerprints]:
        def column(rank: int, of: Mapping[tuple[int, int], int]) -> Any:
            return np.array([of[rank, index] for index in range(len(self.ranks[rank]._calls))], np.uint64)

        if not any(self._outputs.values()) and not any(self._inputs.values()):
            return {}
        return {r: Fingerprints(column(r, self._inputs), column(r, self._outputs)) for r in self.world}
