"""Which algorithm and protocol NCCL takes for a collective, and at what bandwidth.

NCCL ranks its algorithms with a cost model. The same ranking is made here with NCCL's own constants, so that
the switch from one to the next falls where NCCL's does. They are tuned to rank, not to tell the time: that
is nccl_model's part.

Constants and rules: NVIDIA/nccl 2.30.7, commit 5067397c, src/graph/tuning.cc (latencies, bandwidth caps, tree
correction), src/graph/search.cc (speeds), src/enqueue.cc and src/include/device.h (what is allowed). Times in
us, rates in GBps, sizes in bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ranklens_core.timing.message import REDUCING_OPS
from ranklens_core.timing.network import Fabric, NcclNode, Node
from ranklens_core.timing.placement import Placement

_GENERATION = {"volta": 0, "ampere": 1, "hopper": 2, "blackwell": 3}
PROTOCOLS = ("LL", "LL128", "Simple")

# tuning.cc, ncclTunerConstantsDefaults. By algorithm, then LL, LL128, Simple.
BASE_US = {"tree": (6.8, 14.0, 8.4), "ring": (6.6, 14.0, 8.4), "pat": (8.0, 8.0, 8.0)}
HOP_US = {
    "nvlink": {"tree": (0.6, 1.25, 4.0), "ring": (0.6, 1.9, 3.4)},
    "pcie": {"tree": (1.0, 1.9, 4.0), "ring": (1.0, 2.5, 5.7)},
    "net": {"tree": (5.0, 8.5, 14.0), "ring": (2.7, 4.0, 14.0), "pat": (14.0, 14.0, 14.0)},
}
NVLS_US = 25.0
_NVLS_TREE_NET_US = 20.9
# By generation (LL over several nodes: by host CPU, Intel then AMD), then 1, 2, more nodes.
_LL_MAX_GBPS = ((39.0, 39.0, 20.4), (87.7, 22.5, 19.0), (141.0, 45.0, 35.0), (282.0, 90.0, 70.0))
_RING_LL128_CHANNEL_GBPS = (20.0, 20.0, 36.7, 40.0)
_TREE_LL128_CHANNEL_GBPS = ((20.0, 20.0, 20.0), (20.0, 20.0, 20.0), (36.7, 36.7, 29.0), (55.6, 31.67, 20.0))
_TREE_CHANNEL_GBPS = ((26.5, 18.5, 10.0), (24.0, 23.6, 17.8), (38.7, 41.4, 36.0), (70.0, 42.8, 24.0))
_NVLS_TREE_CHANNEL_GBPS = ((0.0, 0.0, 0.0), (0.0, 0.0, 0.0), (0.0, 57.7, 45.5), (0.0, 96.0, 80.0))
_NVLS_EFFICIENCY = (0.0, 0.0, 0.85, 0.74)
# tuning.cc, treeCorrectionFactor: bandwidth by log2(size / 64 B), then 1.
_TREE_CORRECTION = (
    (1, 1, 1, 1, 0.9, 0.8, 0.7, 0.7, 0.7, 0.7, 0.6, 0.5, 0.4, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1, 1, 1, 1),
    (1, 1, 1, 1, 1, 0.9, 0.8, 0.8, 0.8, 0.7, 0.6, 0.6, 0.6, 0.6, 0.6, 0.6, 0.8, 0.9, 0.9, 0.9, 0.9, 1, 1),
    (.9, .9, .9, .9, .9, .9, .9, .8, .7, .6, .6, .5, .5, .5, .5, .6, .7, .8, .7, .7, .8, .9, .9),
)  # fmt: skip
# search.cc, sm90SpeedArrayIntra and sm100SpeedArrayIntra: the speeds NVLS channels are tried at.
_NVLS_SPEEDS = {"hopper": (60, 50, 40, 30, 24, 20), "blackwell": (90, 80, 70, 60, 50, 45, 40)}
# device.h, ncclNvlsSupported: one-byte types cannot be reduced in the switch.
_NVLS_REDUCIBLE = frozenset(
    {"int32", "uint32", "int64", "uint64", "float16", "bfloat16", "float32", "float64"}
)


@dataclass(frozen=True)
class Choice:
    """What NCCL would run, and NCCL's own cost of it (us)."""

    algorithm: str
    protocol: str
    algorithm_GBps: float
    """Message bytes a second, NCCL's figure before its correction of trees."""
    nccl_cost_us: float

    @property
    def label(self) -> str:
        return f"{self.algorithm}/{self.protocol}"


@dataclass(frozen=True)
class NcclChooser:
    """NCCL on one kind of node and fabric. ``fabric`` is None where everything is one node."""

    node: Node
    nccl: NcclNode
    fabric: Fabric | None

    def choose(self, op: str, size: int, placement: Placement, dtype: str) -> Choice:
        """The algorithm and protocol of least cost by NCCL's own model."""
        return min(self._choices(op, size, placement, dtype), key=lambda choice: choice.nccl_cost_us)

    def _choices(self, op: str, size: int, p: Placement, dtype: str) -> Iterator[Choice]:
        for index, protocol in enumerate(PROTOCOLS):
            if protocol == "LL128" and self.node.link != "nvlink":
                continue
            ring_GBps = self._ring_GBps(index, p) * p.n_ranks / ring_steps(op, p)
            ring_us = BASE_US["ring"][index] + self._ring_latency_us(op, index, p)
            ring_us *= self.plateau(op, protocol, size, p)
            yield _choice("ring", protocol, size, ring_us, ring_GBps)
            if op == "all_reduce":
                tree_us = BASE_US["tree"][index] + self._tree_latency_us(index, p)
                tree_GBps = self._tree_GBps(index, p) / 2
                yield _choice("tree", protocol, size, tree_us, tree_GBps, tree_correction(index, size))
        if self._nvls_possible(op, p, dtype):
            if not p.crosses_nodes:
                yield _choice("nvls", "Simple", size, NVLS_US, self._nvls_GBps(op, p))
            elif op == "all_reduce":
                tree_us = NVLS_US + 2 * log2(p.n_nodes) * self.net_us(_NVLS_TREE_NET_US, 2)
                yield _choice("nvls_tree", "Simple", size, tree_us, self._nvls_GBps(op, p))
        if op in ("all_gather", "reduce_scatter") and p.n_nodes == p.n_ranks:
            pat_us = BASE_US["pat"][2] + log2(p.n_nodes) * self.net_us(14.0, 2) / 3.5 + 2.8 * p.n_ranks
            yield _choice("pat", "Simple", size, pat_us, 0.75 * self._bus_GBps(p))

    def _bus_GBps(self, p: Placement) -> float:
        """Ring bus bandwidth: all channels inside a node, held down by the group's share of the NICs."""
        inside = self.nccl.ring_channels * self.nccl.ring_channel_GBps
        if not p.crosses_nodes:
            return inside
        nics = self._nic_GBps(p)
        return min(inside, nics) if p.most_on_node > 1 else nics

    def _nic_GBps(self, p: Placement) -> float:
        assert self.fabric is not None
        return self.fabric.group_GBps(p.fewest_on_node, self.node.ranks_per_node)

    def _ring_GBps(self, index: int, p: Placement) -> float:
        bus = self._bus_GBps(p)
        if index == 0:
            return min(self._ll_max_GBps(p), bus / 2)
        if index == 1:
            cap = _RING_LL128_CHANNEL_GBPS[_GENERATION[self.nccl.generation]]
            return min(bus * 0.92, self.nccl.ring_channels * cap)
        return bus

    def _tree_GBps(self, index: int, p: Placement) -> float:
        generation, nodes = _GENERATION[self.nccl.generation], min(p.n_nodes, 3) - 1
        bus = self._bus_GBps(p)
        if p.n_nodes == 2:
            # Between two nodes a double tree sends each byte once each way, half of what a ring does.
            inside = self.nccl.ring_channels * self.nccl.ring_channel_GBps
            bus = min(2 * self._nic_GBps(p), inside) if p.most_on_node > 1 else 2 * self._nic_GBps(p)
        bus = min(bus * 0.92, self.nccl.ring_channels * _TREE_CHANNEL_GBPS[generation][nodes])
        if index == 0:
            return min(bus / 3.8, self._ll_max_GBps(p))
        if index == 1:
            share = 120 / 128 if p.crosses_nodes else 7 / 9
            return min(bus * share, self.nccl.ring_channels * _TREE_LL128_CHANNEL_GBPS[generation][nodes])
        return bus

    def _ll_max_GBps(self, p: Placement) -> float:
        if not p.crosses_nodes:
            return _LL_MAX_GBPS[_GENERATION[self.nccl.generation]][0]
        return _LL_MAX_GBPS[0 if self.nccl.host_cpu == "intel" else 1][min(p.n_nodes, 3) - 1]

    def _nvls_possible(self, op: str, p: Placement, dtype: str) -> bool:
        if self.node.link != "nvlink" or self.nccl.generation not in _NVLS_SPEEDS:
            return False
        # One or two ranks on a node leave the switch nothing to do; NCCL also wants equal nodes.
        if p.most_on_node <= 2 or p.most_on_node != p.fewest_on_node:
            return False
        if op not in ("all_reduce", "all_gather", "reduce_scatter"):
            return False
        return op not in REDUCING_OPS or dtype in _NVLS_REDUCIBLE

    def _nvls_GBps(self, op: str, p: Placement) -> float:
        heads = p.most_on_node
        # search.cc, ncclTopoSearchTryNvls: each GPU's link carries every head's channel, its own twice.
        speeds = _NVLS_SPEEDS[self.nccl.generation]
        speed = next((s for s in speeds if s * (heads + 1) <= self.nccl.link_GBps), float(speeds[-1]))
        generation = _GENERATION[self.nccl.generation]
        channel = speed * _NVLS_EFFICIENCY[generation] * (heads - 1) / heads
        channel *= 2 if op == "all_reduce" else (heads - 1) / heads
        if p.crosses_nodes:
            between = self._nic_GBps(p) / heads * (2 if p.n_nodes == 2 else 1)
            channel = min(channel, between, _NVLS_TREE_CHANNEL_GBPS[generation][min(p.n_nodes, 3) - 1])
        ratio = p.n_ranks / ring_steps(op, p) if op == "all_reduce" else 1.0
        return heads * channel * ratio

    def _ring_latency_us(self, op: str, index: int, p: Placement) -> float:
        inside = HOP_US[self.node.link]["ring"][index]
        if op in ("broadcast", "reduce"):  # NCCL counts one step where all channels are alike
            return self.net_us(HOP_US["net"]["ring"][index], index) if p.crosses_nodes else inside
        return self.steps_us(ring_steps(op, p), network_steps(op, p), inside, index, p)

    def steps_us(self, steps: int, between: int, inside_us: float, index: int, p: Placement) -> float:
        """Latency of a ring's steps, ``between`` of them over the network, the others ``inside_us`` each."""
        if not between:
            return steps * inside_us
        # Every step of a ring over nodes posts to the network, Simple three times.
        overhead_us = 1.0 if self.nccl.host_cpu == "intel" else 2.0
        inside_us = max(inside_us, overhead_us * (3 if index == 2 else 1))
        # With one rank a node nothing hides the network: NCCL then counts the tree's latency for the ring.
        shape = "tree" if p.most_on_node == 1 else "ring"
        return (steps - between) * inside_us + between * self.net_us(HOP_US["net"][shape][index], index)

    def plateau(self, op: str, protocol: str, size: int, p: Placement) -> float:
        """What NCCL multiplies the latency of a Simple ring all-reduce over nodes with."""
        if op != "all_reduce" or protocol != "Simple" or not p.crosses_nodes:
            return 1.0
        if size // (self.nccl.launched_channels * p.n_ranks) < 64:
            return 1.0
        return 1.9 if self.nccl.generation == "volta" else 1.4

    def _tree_latency_us(self, index: int, p: Placement) -> float:
        inside = HOP_US[self.node.link]["tree"][index]
        network = self.net_us(HOP_US["net"]["tree"][index], index) if p.crosses_nodes else 0.0
        return 2 * ((p.n_ranks // p.n_nodes - 1) * inside + log2(p.n_nodes) * network)

    def net_us(self, nccl_us: float, protocol_index: int) -> float:
        """A network step: NCCL's latency and the fabric's, twice for Simple, which also flushes."""
        extra = self.fabric.latency_us if self.fabric else 0.0
        return nccl_us + extra * (2 if protocol_index == 2 else 1)


def _choice(
    algorithm: str,
    protocol: str,
    size: int,
    latency_us: float,
    algorithm_GBps: float,
    correction: float = 1.0,
) -> Choice:
    cost_us = latency_us + size / (algorithm_GBps * correction * 1e3)
    return Choice(algorithm, protocol, algorithm_GBps, cost_us)


def ring_steps(op: str, p: Placement) -> int:
    if op == "all_reduce":
        return 2 * (p.n_ranks - 1)
    return p.n_ranks - 1 if op in ("all_gather", "reduce_scatter") else p.n_ranks


def network_steps(op: str, p: Placement) -> int:
    if not p.crosses_nodes:
        return 0
    return (2 if op == "all_reduce" else 1) * (p.n_nodes - 1)


def tree_correction(index: int, size: int) -> float:
    position = log2(size >> 6) if size >= 64 else -1
    table = _TREE_CORRECTION[index]
    return float(table[position]) if 0 <= position < len(table) else 1.0


def log2(value: int) -> int:
    """Whole part of the base-2 logarithm."""
    return value.bit_length() - 1
