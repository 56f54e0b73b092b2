"""Logs for the tests of recorded timing: made by hand, or by simulating a random program."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from hypothesis import strategies as st

from ranklens_core.schema import NO_PEER, Purpose, Signature
from ranklens_core.timing.binding import Binding, bind, recorded_transfers
from ranklens_core.timing.join import Joined, join
from ranklens_core.timing.ranklog import NO_TIME, Int64, RankLog
from ranklens_core.timing.schedule import Compute, schedules
from ranklens_core.timing.simulate import Simulation, simulate
from ranklens_core.timing.virtual import in_virtual_time


def signature(op: str, group: str, **changes: Any) -> Signature:
    """A signature of 8 bytes in and out."""
    fields: dict[str, Any] = {
        "op": op,
        "group": group,
        "purpose": Purpose.TENSOR,
        "peer": NO_PEER,
        "reduce_op": "",
        "tag": 0,
        "is_async": True,
        "device": "cpu",
        "in_dtypes": ("float32",),
        "in_shapes": ((2,),),
        "out_dtypes": ("float32",),
        "out_shapes": ((2,),),
        "in_split_sizes": (),
        "out_split_sizes": (),
        "in_msg_bytes": 8,
        "out_msg_bytes": 8,
        "site": "",
        "program_site": "",
    }
    return Signature(**(fields | changes))


class LogBuilder:
    """A rank's log, entry by entry. Own compute is what lies between one entry and the next."""

    def __init__(self, rank: int, groups: Mapping[str, tuple[int, ...]]) -> None:
        self.rank = rank
        self.groups = groups
        self._signatures: dict[Signature, int] = {}
        self._seq_ids: dict[tuple[str, ...], int] = {}
        self._calls: list[dict[str, int]] = []
        self._waits: list[dict[str, int]] = []
        self._free_ns = 0

    def call(
        self, op: str, group: str, start: int, end: int | None, *, blocks: bool = False, **more: Any
    ) -> int:
        """A call; ``end`` None if it never ended. ``more`` is columns or fields of the signature."""
        columns = {name: more.pop(name) for name in ("batch", "src_rank", "seq_id", "step") if name in more}
        described = signature(op, group, **more)
        lane = (group, op, str(described.peer)) if op in ("send", "recv", "recv_any_source") else (group,)
        seq_id = self._seq_ids.get(lane, 0)
        self._seq_ids[lane] = seq_id + 1
        entry = len(self._calls) + len(self._waits)
        self._calls.append(
            {
                "entry": entry,
                "signature": self._signatures.setdefault(described, len(self._signatures)),
                "seq_id": seq_id,
                "step": 0,
                "batch": -1,
                "src_rank": NO_PEER,
                "enqueue_ns": start,
                "start_ns": start,
                "end_ns": NO_TIME if end is None else end,
                "return_ns": NO_TIME if end is None or not blocks else end,
                "compute_ns": start - self._free_ns,
                "compute_cpu_ns": start - self._free_ns,
            }
            | columns
        )
        self._free_ns = start if end is None or not blocks else end
        return entry

    def wait(self, call: int, begin: int, end: int) -> int:
        """The program waits for the call with entry ``call``."""
        entry = len(self._calls) + len(self._waits)
        index = next(i for i, row in enumerate(self._calls) if row["entry"] == call)
        self._waits.append(
            {
                "wait_entry": entry,
                "wait_call": index,
                "wait_begin_ns": begin,
                "wait_end_ns": end,
                "wait_compute_ns": begin - self._free_ns,
                "wait_compute_cpu_ns": begin - self._free_ns,
            }
        )
        self._free_ns = end
        return entry

    def build(self) -> RankLog:
        def column(rows: list[dict[str, int]], name: str) -> Int64:
            return np.array([row[name] for row in rows], np.int64)

        columns = {
            field.name: column(self._waits if field.name.startswith("wait_") else self._calls, field.name)
            for field in dataclasses.fields(RankLog)
            if field.init and field.name not in ("rank", "signatures", "groups")
        }
        return RankLog(rank=self.rank, signatures=tuple(self._signatures), groups=self.groups, **columns)


def joined_of(*builders: LogBuilder) -> tuple[Joined, Binding]:
    joined = join([builder.build() for builder in builders])
    return joined, bind(joined)


# Random programs.

WORLD = (0, 1, 2, 3)
GROUPS = {"0-3": WORLD, "0,1": (0, 1), "2,3": (2, 3), "1,2": (1, 2), "0-2": (0, 1, 2)}

times = st.integers(0, 50)


@st.composite
def recordings(draw: st.DrawFn) -> list[RankLog]:
    """What recording a random program of four ranks gives: collectives of five groups and messages,
    blocking and not, some sends that wait for nobody, waits in any order."""
    builders = {rank: LogBuilder(rank, GROUPS) for rank in WORLD}
    own: dict[int, list[int]] = {rank: [] for rank in WORLD}
    in_flight: dict[int, list[int]] = {rank: [] for rank in WORLD}

    def issue(rank: int, op: str, group: str, blocks: bool, **more: Any) -> None:
        entry = builders[rank].call(op, group, 0, 0, blocks=blocks, **more)
        own[rank].append(draw(times))
        if not blocks:
            in_flight[rank].append(entry)

    def wait(rank: int) -> None:
        at = draw(st.integers(0, len(in_flight[rank]) - 1))
        builders[rank].wait(in_flight[rank].pop(at), 0, 0)
        own[rank].append(draw(times))

    for _ in range(draw(st.integers(1, 12))):
        if draw(st.booleans()):
            group = draw(st.sampled_from(sorted(GROUPS)))
            for rank in GROUPS[group]:
                issue(rank, "all_reduce", group, draw(st.booleans()))
        else:
            source, target, *_ = draw(st.permutations(list(WORLD)))
            eager = draw(st.booleans())
            # an eager send may block, as may any receive: their order is that of the loop
            issue(source, "send", "0-3", eager and draw(st.booleans()), peer=target, tag=int(eager))
            issue(target, "recv", "0-3", False, peer=source, tag=int(eager))
            if not eager:
                wait_at = len(in_flight[target]) - 1
                builders[target].wait(in_flight[target].pop(wait_at), 0, 0)
                own[target].append(draw(times))
        for rank in WORLD:
            while in_flight[rank] and draw(st.booleans()):
                wait(rank)
    for rank in WORLD:
        while in_flight[rank]:
            wait(rank)
    return _recorded(draw, [builders[rank].build() for rank in WORLD], own)


def _recorded(draw: st.DrawFn, logs: Sequence[RankLog], own: Mapping[int, list[int]]) -> list[RankLog]:
    joined = join(logs)
    binding = bind(joined)
    eager = np.array(
        [
            joined.signature(row).op == "send" and joined.signature(row).tag == 1
            for row in range(len(joined.rank))
        ],
        bool,
    )
    binding = dataclasses.replace(binding, waits_for_others=binding.waits_for_others & ~eager)
    transfer = np.array([draw(st.integers(1, 30)) for _ in range(joined.n_exchanges)], np.int64)
    plans = [
        dataclasses.replace(plan, own_ns=np.array(own[plan.rank], np.int64))
        for plan in schedules(joined, Compute.WALL)
    ]
    simulation = simulate(joined, binding, plans, transfer[joined.exchange])
    return list(in_virtual_time(simulation).logs)


def again(joined: Joined, binding: Binding, survivor: int, own_ns: Int64 | None = None) -> Simulation:
    """The recorded job, the survivor with other own compute."""
    plans = [
        dataclasses.replace(plan, own_ns=own_ns) if plan.rank == survivor and own_ns is not None else plan
        for plan in schedules(joined, Compute.ELAPSED)
    ]
    return simulate(joined, binding, plans, recorded_transfers(joined, binding))
