"""The time NCCL takes for a call: its own choice of algorithm, timed with constants measured on the GPU.

A collective's time is launch + steps x latency + what fills the pipeline + bytes / bandwidth. The choice and
its bandwidth are NCCL's (nccl_choice); latencies and efficiencies are the node's ``Calibration``, or NCCL's
where there is none. Rules of channels, chunks and p2p parts: NVIDIA/nccl 2.30.7, commit 5067397c,
src/enqueue.cc and src/graph/paths.cc. Times in us, rates in GBps, sizes in bytes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from ranklens_core.timing.nccl_choice import (
    BASE_US,
    HOP_US,
    NVLS_US,
    PROTOCOLS,
    Choice,
    NcclChooser,
    log2,
    network_steps,
    tree_correction,
)  # fmt: skip
from ranklens_core.timing.network import Calibration, Fabric, NcclNode, Node
from ranklens_core.timing.placement import Placement

_THREADS = {"LL": 512, "LL128": 640, "Simple": 512}
_BYTES_A_THREAD = {"LL": 8, "LL128": 8, "Simple": 64}
_SIMPLE_SLICE_BYTES = 1 << 20  # two of the eight steps of a 4 MiB buffer
_NVLS_FULL_CHUNK_BYTES = 64 << 20  # below, 16 channels x 8 heads do not fill 64 KiB chunks 8 times
_P2P_PART_BYTES = 64 << 10  # an eighth of the 512 KiB NVLink chunk
_P2P_CHUNK_BYTES = 512 << 10
_P2P_NET_CHUNK_BYTES = 128 << 10
_P2P_LL_BYTES = 16 << 10
_P2P_LL_PART_BYTES = 8 << 10  # an eighth of the 64 KiB LL step, up to NCCL 2.28
# paths.cc, ncclTopoGetNchannels: twice the links, at most the 32 that fit a launch; two over PCIe.
_P2P_CHANNELS = {"nvlink": 32, "pcie": 2}


@dataclass(frozen=True)
class NcclModel:
    """NCCL on one kind of node and fabric. ``fabric`` is None where everything is one node."""

    node: Node
    nccl: NcclNode
    fabric: Fabric | None

    def transfer_us(self, op: str, size: int, placement: Placement, dtype: str) -> tuple[float, str]:
        """Time of a call in us, and which algorithm and protocol that is. ``op`` as ``standard_op`` gives."""
        if placement.n_ranks == 1:
            return self._calibration.simple_base_us, "copy"
        if op in ("all_to_all", "gather", "scatter", "send_recv"):
            return self._p2p_us(op, size, placement), "p2p"
        choice = self.choose(op, size, placement, dtype)
        return self._time_us(choice, op, size, placement), choice.label

    def choose(self, op: str, size: int, placement: Placement, dtype: str) -> Choice:
        """The algorithm and protocol NCCL would take."""
        return self._chooser.choose(op, size, placement, dtype)

    @cached_property
    def _chooser(self) -> NcclChooser:
        return NcclChooser(self.node, self.nccl, self.fabric)

    @cached_property
    def _calibration(self) -> Calibration:
        return self.nccl.calibration or uncalibrated(self.node, self.nccl)

    def _time_us(self, choice: Choice, op: str, size: int, p: Placement) -> float:
        fit, index = self._calibration, PROTOCOLS.index(choice.protocol)
        rate = choice.algorithm_GBps * 1e3  # bytes a us
        if choice.algorithm == "nvls":
            ramp = fit.nvls_ramp_us * math.sqrt(min(1.0, size / _NVLS_FULL_CHUNK_BYTES))
            return fit.nvls_base_us + ramp + size / (rate * fit.nvls_efficiency)
        if choice.algorithm in ("nvls_tree", "pat"):
            return choice.nccl_cost_us  # no public measurements: NCCL's own figure
        base = (fit.ll_base_us, fit.ll128_base_us, fit.simple_base_us)[index]
        hop = (fit.ll_hop_us, fit.ll128_hop_us, fit.simple_hop_us)[index]
        moving = size / (rate * (fit.ll_efficiency, fit.ll128_efficiency, fit.simple_efficiency)[index])
        if choice.algorithm == "tree":
            inside = 2 * (p.n_ranks // p.n_nodes - 1) * hop
            network = 2 * log2(p.n_nodes) * self._chooser.net_us(HOP_US["net"]["tree"][index], index)
            return base + inside + network + moving / tree_correction(index, size)
        # A broadcast takes n - 1 steps; NCCL's ring_steps says n, for its bandwidth.
        steps = (2 if op == "all_reduce" else 1) * (p.n_ranks - 1)
        latency = base + self._chooser.steps_us(steps, network_steps(op, p), hop, index, p)
        latency *= self._chooser.plateau(op, choice.protocol, size, p)
        step_bytes = self._step_bytes(choice.protocol, size, p)
        if op in ("all_gather", "reduce_scatter"):
            moving += size / p.n_ranks / (fit.local_copy_GBps * 1e3)
        if choice.protocol == "LL":
            moving = max(moving, steps * step_bytes / (fit.ll_channel_GBps * 1e3))
        elif choice.protocol == "Simple":
            latency += min(step_bytes, _SIMPLE_SLICE_BYTES) / (fit.fill_GBps * 1e3)
        return latency + moving

    def _step_bytes(self, protocol: str, size: int, p: Placement) -> float:
        """Bytes a channel moves in one ring step: NCCL drops channels until each has enough to do."""
        enough = _THREADS[protocol] * _BYTES_A_THREAD[protocol] * (p.n_ranks if protocol == "LL" else 1)
        channels = max(1, min(self.nccl.launched_channels, size // enough))
        return size / (p.n_ranks * channels)

    def _p2p_us(self, op: str, size: int, p: Placement) -> float:
        fit = self._calibration
        peers_inside = p.most_on_node - 1
        peers_across = p.n_ranks - p.most_on_node
        per_peer = float(size) if op == "send_recv" else size / p.n_ranks
        channels, is_ll = self._p2p_channels(per_peer, n_peers=1 if op == "send_recv" else p.n_ranks)
        part = per_peer / channels
        if is_ll:
            base, fill = fit.p2p_ll_base_us, part / (fit.p2p_ll_channel_GBps * 1e3)
        else:
            base, fill = fit.p2p_simple_base_us, min(part, _P2P_CHUNK_BYTES) / (fit.p2p_fill_GBps * 1e3)
        posted = (peers_inside + peers_across) * fit.p2p_peer_us
        inside = (fill if peers_inside else 0.0) + peers_inside * per_peer / (fit.p2p_GBps * 1e3)
        if not peers_across:
            return base + posted + inside
        assert self.fabric is not None
        # All members of a node send at once, except to or from a root: then only the root's share counts.
        nic = self.fabric.group_GBps(1, self.node.ranks_per_node) * 1e3
        across = self._chooser.net_us(HOP_US["net"]["ring"][2], 2)
        across += (min(per_peer, _P2P_NET_CHUNK_BYTES) + peers_across * per_peer) / nic
        return base + posted + max(inside, across)

    def _p2p_channels(self, per_peer: float, n_peers: int) -> tuple[int, bool]:
        """Channels of one peer's message, and whether it takes LL (enqueue.cc, addP2pToPlan)."""
        most = _P2P_CHANNELS[self.node.link]
        shared = max(1, most // n_peers)  # an all-to-all's peers split the channels, a lone peer has them all
        if self.nccl.release_number < (2, 29):
            # LL is decided first, by the channels a peer may have at most, and then takes smaller parts.
            is_ll = per_peer <= most * _P2P_LL_BYTES
            least = _P2P_LL_PART_BYTES if is_ll else _P2P_PART_BYTES
            return max(1, min(shared, math.ceil(per_peer / least))), is_ll
        channels = max(1, min(shared, math.ceil(per_peer / _P2P_PART_BYTES)))
        return channels, per_peer <= channels * _P2P_LL_BYTES


def uncalibrated(node: Node, nccl: NcclNode) -> Calibration:
    """NCCL's own constants in place of measured ones. What NCCL has no constant for costs nothing."""
    hop = HOP_US[node.link]["ring"]
    base = BASE_US["ring"]
    bus = nccl.ring_channels * nccl.ring_channel_GBps
    return Calibration(
        ll_base_us=base[0], ll128_base_us=base[1], simple_base_us=base[2],
        ll_hop_us=hop[0], ll128_hop_us=hop[1], simple_hop_us=hop[2],
        ll_efficiency=1.0, ll128_efficiency=1.0, simple_efficiency=1.0,
        ll_channel_GBps=math.inf, fill_GBps=math.inf, local_copy_GBps=math.inf,
        nvls_base_us=NVLS_US, nvls_efficiency=1.0, nvls_ramp_us=0.0,
        p2p_ll_base_us=base[0] + hop[0], p2p_simple_base_us=base[2] + hop[2], p2p_peer_us=0.0,
        p2p_ll_channel_GBps=math.inf, p2p_fill_GBps=math.inf, p2p_GBps=bus,
    )  # fmt: skip
