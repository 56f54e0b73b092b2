"""Network descriptions, placement and estimates. Right values are worked out by hand in the comments."""

from __future__ import annotations

import itertools
import math
import runpy
from pathlib import Path

import pytest

from ranklens_core.errors import UsageError
from ranklens_core.timing.estimate import Estimate, Estimator
from ranklens_core.timing.interpolate import SizeTable
from ranklens_core.timing.message import message_bytes, standard_op
from ranklens_core.timing.nccl_model import NcclModel
from ranklens_core.timing.nccl_tests import Measurement
from ranklens_core.timing.network import Fabric, NetworkDescription, load_network, network_names
from ranklens_core.timing.placement import Placement, place

MIB = 1 << 20
# A Hopper node with round figures: 360 GBps of rings, 1 us and 2 us everywhere.
TOY = """
name: toy
description: round figures
node:
  name: toy
  ranks_per_node: 8
  link: nvlink
  nccl:
    generation: hopper
    host_cpu: intel
    link_GBps: 370.8
    ring_channels: 12
    ring_channel_GBps: 30.0
    launched_channels: 24
    calibration:
      ll_base_us: 5
      ll128_base_us: 10
      simple_base_us: 14
      ll_hop_us: 1
      ll128_hop_us: 2
      simple_hop_us: 3
      ll_efficiency: 1
      ll128_efficiency: 1
      simple_efficiency: 0.5
      ll_channel_GBps: 1000
      fill_GBps: 100
      local_copy_GBps: 1000
      nvls_base_us: 20
      nvls_efficiency: 1
      nvls_ramp_us: 80
      p2p_ll_base_us: 6
      p2p_simple_base_us: 10
      p2p_peer_us: 0.5
      p2p_ll_channel_GBps: 8.192
      p2p_fill_GBps: 32.768
      p2p_GBps: 300
      expected_error_pct: {all_reduce: 4.5}
fabric:
  name: toy-fabric
  kind: infiniband
  nics_per_node: 8
  nic_GBps: 50
  latency_us: 1
  nic_sharing: fair
"""


@pytest.fixture
def toy_file(tmp_path: Path) -> Path:
    file = tmp_path / "toy.yaml"
    file.write_text(TOY)
    return file


@pytest.fixture
def toy(toy_file: Path) -> Estimator:
    return Estimator(load_network(toy_file))


def model_of(network: NetworkDescription) -> NcclModel:
    assert network.node.nccl is not None
    return NcclModel(network.node, network.node.nccl, network.fabric)


# Placement


def test_ranks_fill_nodes_in_order() -> None:
    assert place(range(8), 8) == Placement(n_ranks=8, n_nodes=1, most_on_node=8, fewest_on_node=8)
    assert place([0, 8, 16, 24], 8) == Placement(n_ranks=4, n_nodes=4, most_on_node=1, fewest_on_node=1)


def test_an_uneven_group_knows_its_fullest_and_emptiest_node() -> None:
    assert place([6, 7, 8], 8) == Placement(n_ranks=3, n_nodes=2, most_on_node=2, fewest_on_node=1)


@pytest.mark.parametrize("ranks", [[], [1, 1], [-1, 0]])
def test_what_is_no_group_is_refused(ranks: list[int]) -> None:
    with pytest.raises(UsageError, match="group"):
        place(ranks, 8)


@pytest.mark.parametrize(
    ("sharing", "nics", "members", "gbps"),
    [
        ("fair", 8, 1, 50.0),  # a NIC a rank: its own
        ("fair", 8, 8, 400.0),
        ("fair", 1, 1, 6.25),  # 8 ranks share one 50 GBps NIC
        ("fair", 16, 1, 100.0),  # two rails a rank
        ("exclusive", 1, 1, 50.0),  # alone on the NIC
        ("exclusive", 4, 8, 200.0),  # all four, no more
        ("exclusive", 8, 2, 100.0),
    ],
)
def test_the_share_of_the_nics(sharing: str, nics: int, members: int, gbps: float) -> None:
    fabric = Fabric("f", "infiniband", nics, 50.0, 0.0, sharing)
    assert fabric.group_GBps(members, 8) == pytest.approx(gbps)


# Message sizes


@pytest.mark.parametrize(
    ("op", "in_bytes", "out_bytes", "size"),
    [
        ("all_reduce", 64, 64, 64),
        ("all_gather_into_tensor", 16, 64, 64),
        ("all_gather", 16, 0, 64),
        ("reduce_scatter_tensor_coalesced", 64, 16, 64),
        ("all_to_all_single", 48, 64, 64),
        ("gather", 16, 0, 64),  # not the root: it has no output
        ("scatter", 0, 16, 64),
        ("barrier", 0, 0, 4),
    ],
)
def test_sizes_are_those_of_nccl_tests(op: str, in_bytes: int, out_bytes: int, size: int) -> None:
    assert message_bytes(op, 4, in_bytes, out_bytes) == size


def test_an_unknown_op_is_named() -> None:
    with pytest.raises(UsageError, match=r"all_shuffle.*known ops.*all_reduce"):
        standard_op("all_shuffle")


# Interpolation


def test_a_power_law_is_met_exactly() -> None:
    # t = 10 n^0.5: at 400 between 100 and 10000, 200.
    table = SizeTable.from_points([(10000, 1000.0), (100, 100.0)])
    assert table.time_ns(400) == pytest.approx(200.0)


def test_below_the_smallest_size_is_its_latency() -> None:
    table = SizeTable.from_points([(100, 100.0), (10000, 1000.0)])
    assert table.time_ns(1) == 100.0
    assert table.time_ns(0) == 100.0


def test_above_the_largest_size_is_the_last_bandwidth() -> None:
    # 900 ns for 9900 bytes more; 9900 bytes beyond the last: 1000 + 900.
    table = SizeTable.from_points([(100, 100.0), (10000, 1000.0)])
    assert table.time_ns(19900) == pytest.approx(1900.0)


def test_noise_never_makes_a_larger_message_cheaper_than_the_last_measured() -> None:
    table = SizeTable.from_points([(100, 100.0), (200, 90.0)])
    assert table.time_ns(400) == 90.0


def test_repeated_sizes_count_as_their_median() -> None:
    assert SizeTable.from_points([(8, 1.0), (8, 100.0), (8, 3.0)]).times_ns == (3.0,)


def test_the_error_of_a_table_comes_from_leaving_its_points_out() -> None:
    # Without (100, 20), the line from (10, 10) to (1000, 1000) says 100 there: off by 400%.
    table = SizeTable.from_points([(10, 10.0), (100, 20.0), (1000, 1000.0)])
    assert table.held_out_error_pct() == pytest.approx(400.0)
    assert SizeTable.from_points([(1, 1.0), (2, 2.0)]).held_out_error_pct() is None


@pytest.mark.parametrize("point", [(8, 0.0), (8, math.nan), (-1, 5.0)])
def test_what_is_no_measurement_is_refused(point: tuple[int, float]) -> None:
    with pytest.raises(UsageError, match="not a measurement"):
        SizeTable.from_points([point])


# NCCL's choice


@pytest.mark.parametrize(
    ("op", "size", "n_ranks", "dtype", "label", "gbps", "cost_us"),
    [
        # 6.6 + 14 x 0.6; LL moves at 141 GBps of bus, 8/14 of it for an all-reduce
        ("all_reduce", 8, 8, "bfloat16", "ring/LL", 141 * 8 / 14, 15.0001),
        # 8 heads x 40 x 0.85 x 7/8 x 2, 8/14 of it = 272; 25 us + 2^29 / 272
        ("all_reduce", 512 * MIB, 8, "bfloat16", "nvls/Simple", 272.0, 25 + 536870.912 / 272),
        # no switch reduction of one byte: 360 x 8/14; 8.4 + 14 x 3.4
        ("all_reduce", 512 * MIB, 8, "int8", "ring/Simple", 360 * 8 / 14, 56 + 536870.912 / (360 * 8 / 14)),
        # 4 heads at 60 would be 60 x 0.85 x 3/4 x 2 x 4 = 306 of bus, less than the ring's 360
        ("all_reduce", 512 * MIB, 4, "bfloat16", "ring/Simple", 240.0, 8.4 + 6 * 3.4 + 536870.912 / 240),
        # 14 + 7 x 1.9 against Simple's 8.4 + 7 x 3.4 = 32.2
        (
            "all_gather",
            8 * MIB,
            8,
            "bfloat16",
            "ring/LL128",
            331.2 * 8 / 7,
            27.3 + 8388.608 / (331.2 * 8 / 7),
        ),
    ],
)
def test_the_choice_inside_a_hopper_node_is_nccls(
    toy: Estimator, op: str, size: int, n_ranks: int, dtype: str, label: str, gbps: float, cost_us: float
) -> None:
    choice = model_of(toy.network).choose(op, size, place(range(n_ranks), 8), dtype)
    assert choice.label == label
    assert choice.algorithm_GBps == pytest.approx(gbps)
    assert choice.nccl_cost_us == pytest.approx(cost_us, rel=1e-4)


def test_the_choice_between_nodes_is_nccls(toy: Estimator) -> None:
    model = model_of(toy.network)
    # One rank a node, 4 nodes, all-reduce of 8 bytes. Tree/LL: 6.8 + 2 x 2 x (5 + 1) = 30.8.
    # Ring/LL: 6.6 + 6 x (5 + 1) = 42.6.
    small = model.choose("all_reduce", 8, place(range(0, 32, 8), 8), "bfloat16")
    assert small.label == "tree/LL"
    assert small.nccl_cost_us == pytest.approx(30.8, abs=0.01)
    # All-gather between single ranks. PAT: 8 + 2 x (14 + 2) / 3.5 + 4 x 2.8 = 28.34. Ring/LL: 6.6 + 3 x 6.
    gather = model.choose("all_gather", 8, place(range(0, 32, 8), 8), "bfloat16")
    assert gather.label == "ring/LL"
    assert gather.nccl_cost_us == pytest.approx(24.6, abs=0.01)
    # Many single ranks: PAT grows by 2.8 a rank and the ring by 6.
    many = model.choose("all_gather", 8, place(range(0, 256, 8), 8), "bfloat16")
    assert many.label == "pat/Simple"


# The time of the choice

HALF_NS = 0.00051  # in us: estimates are whole ns


def us(estimate: Estimate) -> float:
    return estimate.transfer_ns / 1000


def test_ring_ll_is_launch_and_steps(toy: Estimator) -> None:
    assert us(toy.estimate("all_reduce", range(8), 8, 8)) == pytest.approx(5 + 14, abs=HALF_NS)


def test_ring_simple_pays_its_fill_and_its_bandwidth(toy: Estimator) -> None:
    # 14 + 14 x 3; a step of 2^29 / (8 x 24) bytes is over the 1 MiB slice, which passes at 100 GBps;
    # half of 360 x 8/14 GBps.
    expected = 14 + 42 + MIB / 100e3 + 512 * MIB / (0.5 * 360 * 8 / 14 * 1e3)
    assert us(toy.estimate("all_reduce", range(8), 512 * MIB, 512 * MIB, "int8")) == pytest.approx(
        expected, abs=HALF_NS
    )


def test_an_all_gather_also_copies_its_own_shard(toy: Estimator) -> None:
    # LL128: 10 + 7 x 2, 8 MiB at 331.2 x 8/7, and 1 MiB copied at 1000 GBps.
    expected = 10 + 14 + 8 * MIB / (331.2 * 8 / 7 * 1e3) + MIB / 1e6
    assert us(toy.estimate("all_gather_into_tensor", range(8), MIB, 8 * MIB)) == pytest.approx(
        expected, abs=HALF_NS
    )


def test_nvls_loses_time_to_small_chunks_below_64_mib(toy: Estimator) -> None:
    # 16 MiB is a quarter of 64 MiB: half of the 80 us.
    expected = 20 + 40 + 16 * MIB / 272e3
    assert us(toy.estimate("all_reduce", range(8), 16 * MIB, 16 * MIB)) == pytest.approx(
        expected, abs=HALF_NS
    )


def test_a_small_send_is_one_ll_part(toy: Estimator) -> None:
    # 6 + 0.5 + 8 KiB on one channel at 8.192 GBps (1 us) + the wire.
    expected = 6 + 0.5 + 1 + 8192 / 300e3
    assert us(toy.estimate("send", [0, 1], 8192, 0)) == pytest.approx(expected, abs=HALF_NS)
    assert toy.estimate("recv", [0, 1], 0, 8192) == toy.estimate("send", [0, 1], 8192, 0)


def test_a_large_send_fills_a_chunk_on_every_channel(toy: Estimator) -> None:
    # 64 MiB over 32 channels: 2 MiB each, the first 512 KiB chunk at 32.768 GBps takes 16 us.
    expected = 10 + 0.5 + 16 + 64 * MIB / 300e3
    assert us(toy.estimate("send", [0, 1], 64 * MIB, 0)) == pytest.approx(expected, abs=HALF_NS)


def test_an_older_nccl_takes_ll_for_larger_messages(toy_file: Path) -> None:
    toy_file.write_text(TOY.replace("    host_cpu: intel\n", "    host_cpu: intel\n    release: '2.23'\n"))
    # 512 KiB to a peer is within 32 x 16 KiB: LL, in 32 parts of 16 KiB at 8.192 GBps, 2 us.
    expected = 6 + 0.5 + 2 + 512 * 1024 / 300e3
    estimate = Estimator(load_network(toy_file)).estimate("send", [0, 1], 512 * 1024, 0)
    assert us(estimate) == pytest.approx(expected, abs=HALF_NS)


def test_an_all_to_all_sends_its_share_to_each_peer(toy: Estimator) -> None:
    # 8 MiB over 8 ranks: 1 MiB a peer on 4 channels, parts of 256 KiB (8 us); 7 MiB on the wire.
    expected = 10 + 7 * 0.5 + 8 + 7 * MIB / 300e3
    assert us(toy.estimate("all_to_all_single", range(8), 8 * MIB, 8 * MIB)) == pytest.approx(
        expected, abs=HALF_NS
    )


def test_a_send_between_nodes_goes_through_the_nic(toy: Estimator) -> None:
    # NCCL's 14 us network step and the fabric's 1 us twice; 128 KiB first chunk, then 64 MiB at 50 GBps.
    expected = 10 + 0.5 + 16 + (128 * 1024 + 64 * MIB) / 50e3
    assert us(toy.estimate("send", [0, 8], 64 * MIB, 0)) == pytest.approx(expected, abs=HALF_NS)


def test_a_group_of_one_costs_a_launch(toy: Estimator) -> None:
    assert us(toy.estimate("all_reduce", [3], MIB, MIB)) == 14


def test_the_same_group_costs_more_across_nodes() -> None:
    estimator = Estimator(load_network("h100-ib400"))
    for op in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "gather"):
        inside = estimator.estimate(op, range(8), 64 * MIB, 64 * MIB)
        across = estimator.estimate(op, range(0, 64, 8), 64 * MIB, 64 * MIB)
        mixed = estimator.estimate(op, [0, 1, 2, 3, 8, 9, 10, 11], 64 * MIB, 64 * MIB)
        assert inside.transfer_ns < mixed.transfer_ns < across.transfer_ns, op


def test_one_shared_nic_is_the_bottleneck() -> None:
    # All-reduce of 1 GiB over 4 nodes, a rank each, an eighth of 12.5 GBps: a ring moves 2 x 3/4 of it.
    estimate = Estimator(load_network("h100-eth100")).estimate(
        "all_reduce", range(0, 32, 8), 1 << 30, 1 << 30
    )
    assert estimate.transfer_ns / 1e9 == pytest.approx(1.5 * 2**30 / (12.5e9 / 8), rel=0.02)


def test_part_of_each_node_in_use_leaves_more_nic_for_each_rank() -> None:
    network = load_network("h100-eth100")
    full, half = Estimator(network), Estimator(network, ranks_per_node=4)
    size = 1 << 30
    ratio = (
        full.estimate("all_reduce", [0, 8], size, size).transfer_ns
        / half.estimate("all_reduce", [0, 4], size, size).transfer_ns
    )
    assert ratio == pytest.approx(2, rel=0.01)
    with pytest.raises(UsageError, match="ranks_per_node=9"):
        Estimator(network, ranks_per_node=9)


@pytest.mark.parametrize("name", sorted(network_names()))
@pytest.mark.parametrize(
    "op", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send", "barrier"]
)
def test_time_never_falls_as_much_as_a_tenth_while_the_message_doubles(name: str, op: str) -> None:
    estimator = Estimator(load_network(name))
    ranks = [0, 1] if op == "send" else range(8)
    times = [estimator.estimate(op, ranks, 1 << power, 1 << power).transfer_ns for power in range(3, 31)]
    assert all(after > 0.9 * before for before, after in itertools.pairwise(times))


def test_a_ring_between_single_ranks_pays_the_whole_network_latency(toy: Estimator) -> None:
    # All-gather of 8 bytes, 4 nodes: 5 us launch, three steps of 5 (NCCL's tree latency) + 1 (the fabric).
    assert us(toy.estimate("all_gather", range(0, 32, 8), 2, 8)) == pytest.approx(5 + 18, abs=0.002)


def test_a_ring_of_whole_nodes_takes_most_steps_inside(toy: Estimator) -> None:
    # 16 ranks, 2 nodes: 14 steps inside at 1 us, one network step of NCCL's 2.7 + 1.
    assert us(toy.estimate("all_gather", range(16), 1, 16)) == pytest.approx(5 + 14 + 3.7, abs=0.002)


# Alpha-beta


def test_loopback_is_alpha_beta() -> None:
    estimator = Estimator(load_network("loopback"))
    # Two ranks: two ring steps of 83 us; 33 MB in all at 3.3 GBps is 10 ms.
    estimate = estimator.estimate("all_reduce", [0, 1], 33_000_000, 33_000_000)
    assert estimate == Estimate(10_166_000, "alpha-beta, loopback", None, "estimated")
    # Four ranks gather 13.2 MB: three steps, three quarters of it.
    assert us(estimator.estimate("all_gather", range(4), 3_300_000, 13_200_000)) == pytest.approx(249 + 3000)
    assert us(estimator.estimate("send", [0, 5], 3_300_000, 0)) == pytest.approx(83 + 1000)


# Best source first


def points(op: str, n_ranks: int, **more: object) -> list[Measurement]:
    sized = [(1024, 10_000), (4096, 20_000), (16384, 40_000)]
    return [Measurement(op, n_ranks, 1, size, time, **more) for size, time in sized]  # type: ignore[arg-type]


def test_measurements_go_before_the_model(toy: Estimator) -> None:
    estimator = Estimator(toy.network, measurements=points("all_reduce", 8))
    estimate = estimator.estimate("all_reduce", range(8), 2048, 2048)
    # A square-root law: the leave-one-out error is nothing.
    assert estimate.transfer_ns == round(10_000 * math.sqrt(2))
    assert estimate.source == "measured all_reduce, 8 ranks on 1 node(s)"
    assert estimate.expected_error_pct == pytest.approx(0, abs=1e-9)
    assert estimate.provenance == "estimated"


def test_an_extrapolation_says_so_and_promises_nothing(toy: Estimator) -> None:
    estimate = Estimator(toy.network, measurements=points("all_reduce", 8)).estimate(
        "all_reduce", range(8), 28672, 28672
    )
    assert estimate.transfer_ns == 40_000 + 20_000  # 20 us for 12 KiB more, and 12 KiB beyond
    assert estimate.source.endswith("extrapolated")
    assert estimate.expected_error_pct is None


def test_other_shapes_still_come_from_the_model(toy: Estimator) -> None:
    estimator = Estimator(toy.network, measurements=points("all_reduce", 8))
    other = estimator.estimate("all_reduce", range(4), 2048, 2048)
    assert other == toy.estimate("all_reduce", range(4), 2048, 2048)
    assert other.source == "nccl model ring/LL, toy"
    assert other.expected_error_pct == 4.5
    assert estimator.estimate("all_reduce", range(0, 64, 8), 2048, 2048).expected_error_pct is None


def test_the_very_group_goes_before_its_shape(toy: Estimator) -> None:
    own = [Measurement("all_reduce", 2, 1, 1024, 7_000, group_ranks=(2, 3))]
    estimator = Estimator(toy.network, measurements=own + points("all_reduce", 2))
    assert estimator.estimate("all_reduce", [2, 3], 1024, 1024).transfer_ns == 7_000
    assert estimator.estimate("all_reduce", [0, 1], 1024, 1024).transfer_ns == 10_000


def test_the_same_dtype_goes_before_the_others(toy: Estimator) -> None:
    slow = [Measurement("all_reduce", 8, 1, size, 90_000, dtype="int8") for size in (1024, 4096)]
    estimator = Estimator(toy.network, measurements=slow + points("all_reduce", 8, dtype="bfloat16"))
    assert estimator.estimate("all_reduce", range(8), 1024, 1024, "int8").transfer_ns == 90_000
    assert estimator.estimate("all_reduce", range(8), 1024, 1024, "bfloat16").transfer_ns == 10_000


def test_sendrecv_perf_stands_for_any_pair(toy: Estimator) -> None:
    estimator = Estimator(toy.network, measurements=points("send_recv", 8))
    assert estimator.estimate("recv", [2, 5], 0, 4096).transfer_ns == 20_000
    assert estimator.estimate("recv", [2, 9], 0, 4096).source == "nccl model p2p, toy"


def test_send_needs_a_pair(toy: Estimator) -> None:
    with pytest.raises(UsageError, match="pair"):
        toy.estimate("send", range(4), 8, 0)


# Descriptions


def test_every_shipped_network_loads() -> None:
    names = network_names()
    assert {"h100-ib400", "h200-eth400", "a100-eth100", "b200-ib400", "loopback"} <= set(names)
    for name in names:
        assert load_network(name).name == name


def test_a_file_may_name_a_shipped_node_and_its_own_logs(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(
        "name: mine\ndescription: d\nnode: h100\nfabric: eth100\n"
        "nccl_tests_logs:\n  - path: logs/ar.log\n  - {path: /abs/old.log, op: all_gather}\n"
    )
    network = load_network(file)
    assert network.node == load_network("h100-ib400").node
    assert [log.path for log in network.nccl_tests_logs] == [str(tmp_path / "logs/ar.log"), "/abs/old.log"]
    assert network.nccl_tests_logs[1].op == "all_gather"
    with pytest.raises(UsageError, match=r"cannot read the nccl-tests log .*ar\.log"):
        Estimator(network)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("link: nvlink", "link: nvlnk", r"node\.link: 'nvlnk' is not one of: nvlink, pcie, loopback"),
        ("ranks_per_node: 8", "ranks_per_node: 0", r"node\.ranks_per_node: must be above 0, found 0"),
        ("ranks_per_node: 8", "ranks_per_node: 8.5", r"node\.ranks_per_node: expected a whole number"),
        ("ranks_per_node: 8", "ranks_per_node: true", r"node\.ranks_per_node: expected a whole number"),
        ("latency_us: 1\n", "latency_us: -1\n", r"fabric\.latency_us: must be at least 0"),
        ("nic_GBps: 50", "nic_Gbps: 50", r"unknown key 'fabric\.nic_Gbps'; allowed here: .*nic_GBps"),
        ("  nics_per_node: 8\n", "", r"missing key 'fabric\.nics_per_node'"),
        ("nic_GBps: 50", "nic_GBps: .nan", r"fabric\.nic_GBps: expected a number"),
        ("description: round figures", "description: 5", r"description: expected text, found 5"),
        ("    host_cpu: intel\n", "    host_cpu: intel\n    release: 2.3\n", r"release: expected text"),
        ("    host_cpu: intel\n", "    host_cpu: intel\n    release: new\n", r"release: write major\.minor"),
        ("all_reduce: 4.5", "all_reduce: none", r"expected_error_pct\.all_reduce: expected a number"),
        ("  link: nvlink\n", "  link: nvlink\n  alpha_beta: {latency_us: 1, bandwidth_GBps: 1}\n", "either"),
        ("name: toy\n", "name: [toy\n", "not a readable YAML file"),
        ("name: toy\n", "name: !!python/object/apply:os.getcwd []\n", "not a readable YAML file"),
    ],
)
def test_a_wrong_file_is_told_file_key_and_allowed_values(
    toy_file: Path, old: str, new: str, message: str
) -> None:
    assert old in TOY
    toy_file.write_text(TOY.replace(old, new, 1))
    with pytest.raises(UsageError, match=message) as error:
        load_network(toy_file)
    assert str(toy_file) in str(error.value)


def test_unknown_names_are_answered_with_the_known(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no network named 'h300'.*h100-ib400"):
        load_network("h300")
    with pytest.raises(UsageError, match="no network file"):
        load_network(tmp_path / "absent.yaml")
    file = tmp_path / "f.yaml"
    file.write_text("name: f\ndescription: d\nnode: h300\n")
    with pytest.raises(UsageError, match=r"no node named 'h300'; allowed: a100"):
        load_network(file)


def test_a_group_over_nodes_needs_a_fabric(tmp_path: Path) -> None:
    file = tmp_path / "f.yaml"
    file.write_text("name: f\ndescription: d\nnode: h100\n")
    with pytest.raises(UsageError, match="has no fabric"):
        Estimator(load_network(file)).estimate("all_reduce", range(16), 8, 8)


def test_half_the_bandwidth_doubles_what_is_bandwidth(toy: Estimator) -> None:
    halved = Estimator(toy.network.scaled(bandwidth=0.5))
    size = 1 << 33
    for op, ranks in (("all_reduce", range(0, 64, 8)), ("all_gather", range(8)), ("send", [0, 1])):
        before, after = (e.estimate(op, ranks, size, size, "int8").transfer_ns for e in (toy, halved))
        assert after / before == pytest.approx(2, rel=0.02), op
    loopback = load_network("loopback").scaled(bandwidth=0.5)
    assert us(Estimator(loopback).estimate("send", [0, 1], 3_300_000, 0)) == pytest.approx(83 + 2000)
    with pytest.raises(UsageError, match="positive"):
        toy.network.scaled(bandwidth=0)


# Against public measurements

MEASURED = Path(__file__).resolve().parents[2] / "shared" / "data" / "nccl_measured.csv.gz"
BENCHMARK = Path(__file__).resolve().parents[1] / "benchmarks" / "estimates.py"


@pytest.mark.skipif(not MEASURED.is_file(), reason="needs ../shared/data/nccl_measured.csv.gz")
def test_the_benchmark_reaches_its_aims() -> None:
    benchmark = runpy.run_path(str(BENCHMARK))
    groups = benchmark["read_groups"](MEASURED)
    assert benchmark["print_interpolation"](groups) <= 6.0
    assert benchmark["print_model"](groups) <= 12.0


@pytest.mark.skipif(not MEASURED.is_file(), reason="needs ../shared/data/nccl_measured.csv.gz")
@pytest.mark.parametrize(("network", "system"), [("h100-ib400", "h100_sxm"), ("a100-eth100", "a100_sxm")])
def test_the_promised_error_is_what_is_measured(network: str, system: str) -> None:
    benchmark = runpy.run_path(str(BENCHMARK))
    groups = benchmark["read_groups"](MEASURED)
    nccl = load_network(network).node.nccl
    assert nccl is not None
    assert nccl.calibration is not None
    generation = next(name for name, systems in benchmark["CALIBRATED_ON"].items() if system in systems)
    fit = benchmark["Fit"](benchmark["CALIBRATED_ON"][generation], groups)
    for op, promised in nccl.calibration.expected_error_pct.items():
        measured = fit.error_pct(nccl.calibration, held_out=True, op=op)
        assert promised == pytest.approx(measured, abs=0.3), op
