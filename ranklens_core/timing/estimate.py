"""How long a call takes that nobody recorded: the best source there is, and which one it was."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from ranklens_core.errors import UsageError
from ranklens_core.timing.interpolate import SizeTable
from ranklens_core.timing.message import message_bytes, standard_op
from ranklens_core.timing.nccl_model import NcclModel
from ranklens_core.timing.nccl_tests import Measurement, read_nccl_tests_log
from ranklens_core.timing.network import AlphaBeta, NetworkDescription
from ranklens_core.timing.placement import Placement, place

SAME_RANK = "same rank"
"""Source of the transfer of a message that a rank sends to itself: 0 ns."""


@dataclass(frozen=True)
class Estimate:
    """Time from the last arrival to the end of a call (``transfer_ns``), and what that is worth."""

    transfer_ns: int
    source: str
    """What it came from: ``measured ...``, ``nccl model ring/LL, h100-ib400`` or ``alpha-beta ...``."""
    expected_error_pct: float | None
    """Mean error of this source where it could be checked; None where it could not."""
    provenance: str = "estimated"


@dataclass(frozen=True)
class _Key:
    op: str
    n_ranks: int
    n_nodes: int
    group_ranks: tuple[int, ...] | None


class Estimator:
    """Estimates for one network; measurements first, then NCCL's model, then alpha-beta."""

    def __init__(
        self, network: NetworkDescription, *, measurements: Iterable[Measurement] = (),
        ranks_per_node: int | None = None,
    ) -> None:  # fmt: skip
        """``measurements`` (recorded calls, say) join those of the network's nccl-tests logs.

        ``ranks_per_node`` overrides the node's, for a job that uses part of each node. Raises UsageError for
        a log that cannot be read or a number of ranks that does not fit the node.
        """
        per_node = network.node.ranks_per_node if ranks_per_node is None else ranks_per_node
        if not 1 <= per_node <= network.node.ranks_per_node:
            raise UsageError(
                f"ranks_per_node={per_node}: {network.name} has {network.node.ranks_per_node} ranks a node; "
                f"give 1 to {network.node.ranks_per_node}"
            )
        self.network = network
        self.ranks_per_node = per_node
        self._nccl = None
        if network.node.nccl is not None:
            in_use = dataclasses.replace(network.node, ranks_per_node=per_node)
            self._nccl = NcclModel(in_use, network.node.nccl, network.fabric)
        self._points: dict[_Key, list[Measurement]] = defaultdict(list)
        for log in network.nccl_tests_logs:
            self._add(read_nccl_tests_log(log.path, op=log.op))
        self._add(measurements)
        self._table = lru_cache(maxsize=None)(self._build_table)

    def estimate(
        self, op: str, group_ranks: Sequence[int], in_bytes: int, out_bytes: int, dtype: str = "bfloat16"
    ) -> Estimate:
        """Estimate one call of one rank.

        Parameters: ``op`` as torch names it (``all_gather_into_tensor``, ``..._coalesced``, ``send``);
        ``group_ranks`` global ranks of the group, for send and recv of the pair; ``in_bytes`` and
        ``out_bytes`` of this rank's tensors; ``dtype`` torch's name, which says whether a switch can
        reduce it. Raises UsageError for an unknown op, a bad group, a group over several nodes of a network
        that has no fabric.
        """
        kind = standard_op(op)
        if kind == "send_recv" and len(group_ranks) != 2:
            raise UsageError(f"{op}: give the pair of global ranks, not {len(group_ranks)} ranks")
        placement = place(group_ranks, self.ranks_per_node)
        size = message_bytes(op, placement.n_ranks, in_bytes, out_bytes)
        measured = self._measured(kind, tuple(group_ranks), placement, size, dtype)
        return measured or self._modelled(kind, size, placement, dtype)

    def _add(self, measurements: Iterable[Measurement]) -> None:
        for measurement in measurements:
            self._points[_key(measurement)].append(measurement)

    def _measured(
        self, op: str, group_ranks: tuple[int, ...], placement: Placement, size: int, dtype: str
    ) -> Estimate | None:
        for ranks in (group_ranks, None):
            key = _shape(op, placement.n_ranks, placement.n_nodes, ranks)
            if key not in self._points:
                continue
            table, error_pct = self._table(key, dtype)
            inside = table.covers(size)
            what = f"measured {op}, {placement.n_ranks} ranks on {placement.n_nodes} node(s)"
            return Estimate(
                transfer_ns=round(table.time_ns(size)),
                source=what if inside else f"{what}, extrapolated",
                expected_error_pct=error_pct if inside else None,
            )
        return None

    def _build_table(self, key: _Key, dtype: str) -> tuple[SizeTable, float | None]:
        points = self._points[key]
        # The dtype decides the algorithm at times, so its own points are better, if they make a curve.
        same = [point for point in points if point.dtype == dtype]
        if len({point.message_bytes for point in same}) >= 2:
            points = same
        table = SizeTable.from_points((point.message_bytes, point.transfer_ns) for point in points)
        return table, table.held_out_error_pct()

    def _modelled(self, op: str, size: int, placement: Placement, dtype: str) -> Estimate:
        if placement.crosses_nodes and self.network.fabric is None:
            raise UsageError(
                f"network {self.network.name} is one node of {self.ranks_per_node} ranks and has no fabric; "
                "a group of ranks on several nodes needs a network with one (see docs/network.md)"
            )
        if self._nccl is not None:
            time_us, label = self._nccl.transfer_us(op, size, placement, dtype)
            calibration = self._nccl.nccl.calibration
            known = calibration.expected_error_pct if calibration and not placement.crosses_nodes else {}
            source = f"nccl model {label}, {self.network.name}"
            return Estimate(round(time_us * 1000), source, known.get(op))
        step = self.network.node.alpha_beta
        assert step is not None  # Node has one of the two
        time_us = self._alpha_beta_us(op, size, placement, step)
        return Estimate(round(time_us * 1000), f"alpha-beta, {self.network.name}", None)

    def _alpha_beta_us(self, op: str, size: int, placement: Placement, step: AlphaBeta) -> float:
        """Ring steps of Thakur et al. (2005), each latency + bytes / bandwidth, at the slowest link."""
        latency_us, rate = step.latency_us, step.bandwidth_GBps
        if placement.crosses_nodes:
            fabric = self.network.fabric
            assert fabric is not None  # checked by the caller
            latency_us += fabric.latency_us
            rate = min(rate, fabric.group_GBps(placement.fewest_on_node, self.ranks_per_node))
        n = placement.n_ranks
        if n == 1:
            return latency_us
        share = size / n
        steps, moved = {
            "all_reduce": (2 * (n - 1), 2 * (n - 1) * share),
            "send_recv": (1, float(size)),
            "broadcast": (n - 1, float(size)),
            "reduce": (n - 1, float(size)),
        }.get(op, (n - 1, (n - 1) * share))
        return steps * latency_us + moved / (rate * 1e3)


def _key(measurement: Measurement) -> _Key:
    op = standard_op(measurement.op)
    return _shape(op, measurement.n_ranks, measurement.n_nodes, measurement.group_ranks)


def _shape(op: str, n_ranks: int, n_nodes: int, group_ranks: tuple[int, ...] | None) -> _Key:
    """sendrecv_perf passes messages round all its ranks: each is a pair, across nodes if any pair is."""
    if op == "send_recv" and group_ranks is None:
        return _Key(op, 2, min(n_nodes, 2), None)
    return _Key(op, n_ranks, n_nodes, group_ranks)
