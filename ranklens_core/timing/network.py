"""Network descriptions: nodes, links and NICs, from ``configs/network/*.yaml`` or a user's file.

A network is a node (``configs/network/node``) and a fabric (``configs/network/fabric``), each named or
written inline. GBps is 1e9 bytes a second, in one direction. See docs/network.md.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ranklens_core.configs_dir import configs_dir
from ranklens_core.errors import UsageError
from ranklens_core.timing.typed_yaml import NOT_NEGATIVE, POSITIVE, build, read_mapping


@dataclass(frozen=True)
class Calibration:
    """What NCCL's kernels measured on one GPU generation; NCCL's own constants only rank its choices.

    Times in us, rates in GBps, efficiencies as a share of NCCL's bus bandwidth. Fitted by
    ``benchmarks/estimates.py --fit`` on the rows that the node's file names.
    """

    ll_base_us: float = field(metadata=POSITIVE)
    ll128_base_us: float = field(metadata=POSITIVE)
    simple_base_us: float = field(metadata=POSITIVE)
    """Launch, and what a protocol pays once."""
    ll_hop_us: float = field(metadata=POSITIVE)
    ll128_hop_us: float = field(metadata=POSITIVE)
    simple_hop_us: float = field(metadata=POSITIVE)
    """Each step of a ring or tree inside a node."""
    ll_efficiency: float = field(metadata=POSITIVE)
    ll128_efficiency: float = field(metadata=POSITIVE)
    simple_efficiency: float = field(metadata=POSITIVE)
    ll_channel_GBps: float = field(metadata=POSITIVE)
    """One channel of LL: what limits a message too small for all channels."""
    fill_GBps: float = field(metadata=POSITIVE)
    """How fast a Simple pipeline's first slice passes."""
    local_copy_GBps: float = field(metadata=POSITIVE)
    """A rank's own shard, input to output buffer (all-gather, reduce-scatter)."""
    nvls_base_us: float = field(metadata=POSITIVE)
    nvls_efficiency: float = field(metadata=POSITIVE)
    nvls_ramp_us: float = field(metadata=POSITIVE)
    """Time NVLS loses to its smaller chunks, reached at 64 MiB."""
    p2p_ll_base_us: float = field(metadata=POSITIVE)
    p2p_simple_base_us: float = field(metadata=POSITIVE)
    p2p_peer_us: float = field(metadata=POSITIVE)
    """Each peer of an all-to-all."""
    p2p_ll_channel_GBps: float = field(metadata=POSITIVE)
    p2p_fill_GBps: float = field(metadata=POSITIVE)
    """How fast one channel passes its first p2p chunk."""
    p2p_GBps: float = field(metadata=POSITIVE)
    expected_error_pct: Mapping[str, float] = field(default_factory=dict)
    """Held-out mean error inside one node, by op; an op that is absent was never measured."""


@dataclass(frozen=True)
class NcclNode:
    """What NCCL's topology search finds inside a node, and how its kernels measured there."""

    generation: str = field(metadata={"choices": ("volta", "ampere", "hopper", "blackwell")})
    host_cpu: str = field(metadata={"choices": ("intel", "amd")})
    link_GBps: float = field(metadata=POSITIVE)
    """All links of one GPU together, as NCCL counts them."""
    ring_channels: int = field(metadata=POSITIVE)
    ring_channel_GBps: float = field(metadata=POSITIVE)
    launched_channels: int = field(metadata=POSITIVE)
    """Channels a kernel launches (NCCL doubles its rings)."""
    calibration: Calibration | None = None
    """None: nobody measured this GPU; NCCL's own constants tell the time too."""
    release: str = "2.30"
    """NCCL's major.minor; up to 2.28 larger p2p messages take LL."""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"\d+\.\d+", self.release):
            raise UsageError(f"node.nccl.release: write major.minor in quotes, '2.27', not {self.release!r}")

    @property
    def release_number(self) -> tuple[int, int]:
        major, minor = self.release.split(".")
        return int(major), int(minor)


@dataclass(frozen=True)
class AlphaBeta:
    """Time of a step = latency + bytes / bandwidth."""

    latency_us: float = field(metadata=POSITIVE)
    bandwidth_GBps: float = field(metadata=POSITIVE)


@dataclass(frozen=True)
class Node:
    """One host. Exactly one of ``nccl`` and ``alpha_beta`` says how its ranks talk to each other."""

    name: str
    ranks_per_node: int = field(metadata=POSITIVE)
    link: str = field(metadata={"choices": ("nvlink", "pcie", "loopback")})
    nccl: NcclNode | None = None
    alpha_beta: AlphaBeta | None = None

    def __post_init__(self) -> None:
        if (self.nccl is None) == (self.alpha_beta is None):
            raise UsageError(f"node {self.name}: give either 'nccl' or 'alpha_beta'")


@dataclass(frozen=True)
class Fabric:
    """What joins the nodes."""

    name: str
    kind: str = field(metadata={"choices": ("infiniband", "ethernet")})
    nics_per_node: int = field(metadata=POSITIVE)
    nic_GBps: float = field(metadata=POSITIVE)
    latency_us: float = field(metadata=NOT_NEGATIVE)
    """Added to NCCL's own latency of a network step."""
    nic_sharing: str = field(metadata={"choices": ("fair", "exclusive")})
    """fair: all ranks of a node communicate at once, each with its share of the NICs (as data-parallel
    groups do). exclusive: one group at a time, each member with a NIC of its own while there are enough."""

    def group_GBps(self, members_on_node: int, ranks_per_node: int) -> float:
        """NIC bandwidth of a node that a group with so many members there gets, in GBps."""
        fair_nics = members_on_node * self.nics_per_node / ranks_per_node
        if self.nic_sharing == "fair":
            return fair_nics * self.nic_GBps
        return min(float(self.nics_per_node), max(fair_nics, float(members_on_node))) * self.nic_GBps


@dataclass(frozen=True)
class MeasuredLog:
    """One nccl-tests log of the user's. ``op`` where the log itself does not name its test."""

    path: str
    op: str | None = None


@dataclass(frozen=True)
class NetworkDescription:
    """A cluster, as far as the time of its communication goes."""

    name: str
    description: str
    node: Node
    fabric: Fabric | None = None
    """None: everything is one node."""
    nccl_tests_logs: tuple[MeasuredLog, ...] = ()
    """The user's own measurements, which are preferred to any model. Paths relative to the file."""

    def scaled(self, *, bandwidth: float = 1.0) -> NetworkDescription:
        """This network with every link's and NIC's bandwidth times ``bandwidth``, for a what-if.

        The user's logs are left out: they were measured at the old bandwidth. Raises UsageError.
        """
        if not (bandwidth > 0 and math.isfinite(bandwidth)):
            raise UsageError(f"bandwidth scale must be a positive number, not {bandwidth}")
        nccl, alpha_beta, fabric = self.node.nccl, self.node.alpha_beta, self.fabric
        if nccl is not None:
            calibration = nccl.calibration
            if calibration is not None:
                calibration = dataclasses.replace(calibration, p2p_GBps=calibration.p2p_GBps * bandwidth)
            nccl = dataclasses.replace(
                nccl,
                link_GBps=nccl.link_GBps * bandwidth,
                ring_channel_GBps=nccl.ring_channel_GBps * bandwidth,
                calibration=calibration,
            )
        if alpha_beta is not None:
            alpha_beta = dataclasses.replace(alpha_beta, bandwidth_GBps=alpha_beta.bandwidth_GBps * bandwidth)
        if fabric is not None:
            fabric = dataclasses.replace(fabric, nic_GBps=fabric.nic_GBps * bandwidth)
        return dataclasses.replace(
            self,
            name=f"{self.name} x{bandwidth:g} bandwidth",
            node=dataclasses.replace(self.node, nccl=nccl, alpha_beta=alpha_beta),
            fabric=fabric,
            nccl_tests_logs=(),
        )


def network_names() -> list[str]:
    """The names ``load_network`` knows."""
    return sorted(path.stem for path in _network_dir().glob("*.yaml"))


def _network_dir() -> Path:
    return configs_dir() / "network"


def load_network(name_or_file: str | Path) -> NetworkDescription:
    """Load a description by name (``h100-ib400``) or by file path (``my-cluster.yaml``).

    Raises UsageError naming the file, the key and the allowed values.
    """
    text = str(name_or_file)
    if text.endswith((".yaml", ".yml")) or "/" in text:
        file = Path(text)
        if not file.is_file():
            known = ", ".join(network_names())
            raise UsageError(f"no network file {file}; give an existing file or one of: {known}")
    elif text in network_names():
        file = _network_dir() / f"{text}.yaml"
    else:
        known = ", ".join(network_names())
        raise UsageError(f"no network named {text!r}; give a .yaml file or one of: {known}")
    values = read_mapping(file)
    for part in ("node", "fabric"):
        _fill_in(values, part, file)
    node = values.get("node")
    if isinstance(node, dict) and isinstance(node.get("nccl"), dict):
        _fill_in(node["nccl"], "calibration", file)
    network = build(NetworkDescription, values, file)
    logs = tuple(
        dataclasses.replace(log, path=str(file.parent / Path(log.path).expanduser()))
        for log in network.nccl_tests_logs
    )
    return dataclasses.replace(network, nccl_tests_logs=logs)


def network_named(name_or_file: str | None, bandwidth: float = 1.0) -> NetworkDescription | None:
    """The network of a command line, its bandwidth times ``bandwidth``; None if none is named.

    Raises UsageError as ``load_network`` and ``scaled``, and for a factor without a network.
    """
    if name_or_file is None:
        if bandwidth != 1.0:
            raise UsageError("--bandwidth scales the network that --network names: name one")
        return None
    network = load_network(name_or_file)
    return network if bandwidth == 1.0 else network.scaled(bandwidth=bandwidth)


def _fill_in(values: dict[str, Any], part: str, used_in: Path) -> None:
    """Replace a part's name by the content of its file (``node: h100`` by ``node/h100.yaml``)."""
    name = values.get(part)
    if not isinstance(name, str):
        return
    directory = _network_dir() / part
    known = sorted(path.stem for path in directory.glob("*.yaml"))
    if name not in known:
        raise UsageError(
            f"{used_in}: {part}: no {part} named {name!r}; allowed: {', '.join(known)}, or a mapping"
        )
    values[part] = read_mapping(directory / f"{name}.yaml")
