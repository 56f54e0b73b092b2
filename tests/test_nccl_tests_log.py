# ruff: noqa: E501  the rows are as nccl-tests prints them
"""The nccl-tests parser, on the formats its releases print (src/util.cu and src/common.cu of nccl-tests)."""

from __future__ import annotations

from pathlib import Path

import pytest

from ranklens_core.errors import UsageError
from ranklens_core.timing.nccl_tests import Measurement, parse_nccl_tests_log, read_nccl_tests_log


def ranks(n: int, host: str = "node1") -> str:
    line = "#  Rank {i:2d} Group  0 Pid   {pid} on {host:>10} device {i:2d} [0000:{i:02x}:00] NVIDIA H100 80GB HBM3"
    return "".join(line.format(i=i, pid=1000 + i, host=host) + "\n" for i in range(n))


HEADER = """#
#                                                              out-of-place                       in-place
#       size         count      type   redop    root     time   algbw   busbw  #wrong     time   algbw   busbw  #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)             (us)  (GB/s)  (GB/s)
"""
FOOTER = """# Out of bounds values : 0 OK
# Avg bus bandwidth    : 37.2
#
# Collective test concluded: {name}
"""


def log(name: str, rows: str, device_lines: str = ranks(8), header: str = HEADER) -> str:
    start = (
        "# nccl-tests version 2.17.9 nccl-headers=22902 nccl-library=22902\n"
        f"# Collective test starting: {name}\n"
        "# nThread 1 nGpus 8 minBytes 8 maxBytes 128 step: 2(factor) warmup iters: 1 iters: 20 agg iters: 1\n#\n"
    )
    return f"{start}# Using devices\n{device_lines}{header}{rows}{FOOTER.format(name=name)}"


ALL_REDUCE = log(
    "all_reduce_perf",
    "           8             2     float     sum      -1    15.52    0.00    0.00       0    15.31    0.00    0.00       0\n"
    "   536870912     134217728      half     sum      -1   2112.0  254.20  444.85       0   2104.1  255.15  446.52       0\n",
)
ALL_GATHER = log(
    "all_gather_perf",
    "     1048576         16384     float    none      -1    16.95   61.86   54.13       0    17.20   60.96   53.34       0\n",
)


def test_all_reduce_gives_its_in_place_times() -> None:
    assert parse_nccl_tests_log(ALL_REDUCE) == [
        Measurement("all_reduce", 8, 1, 8, 15_310, "float32"),
        Measurement("all_reduce", 8, 1, 536870912, 2_104_100, "float16"),
    ]


def test_all_gather_gives_its_out_of_place_times() -> None:
    assert parse_nccl_tests_log(ALL_GATHER) == [Measurement("all_gather", 8, 1, 1048576, 16_950, "float32")]


def test_several_logs_in_one_file() -> None:
    two_nodes = log(
        "sendrecv_perf",
        "        1024           256     float    none      -1    21.00    0.05    0.05       0    20.00    0.05    0.05     N/A\n",
        ranks(1, "node1") + ranks(1, "node2"),
    )
    found = parse_nccl_tests_log(ALL_REDUCE + ALL_GATHER + two_nodes)
    assert [(m.op, m.n_ranks, m.n_nodes) for m in found] == [
        ("all_reduce", 8, 1),
        ("all_reduce", 8, 1),
        ("all_gather", 8, 1),
        ("send_recv", 2, 2),
    ]
    assert found[-1].transfer_ns == 21_000


@pytest.mark.parametrize(
    ("name", "op"),
    [
        ("reduce_scatter_perf", "reduce_scatter"),
        ("alltoall_perf", "all_to_all"),
        ("broadcast_perf", "broadcast"),
        ("reduce_perf", "reduce"),
        ("gather_perf", "gather"),
        ("scatter_perf", "scatter"),
    ],
)
def test_every_test_by_its_name(name: str, op: str) -> None:
    row = "        1024            16      half    none      -1     9.00    0.11    0.10       0     8.00    0.13    0.11       0\n"
    (found,) = parse_nccl_tests_log(log(name, row))
    assert found.op == op
    assert found.transfer_ns == (8_000 if op in ("broadcast", "reduce") else 9_000)


OLD_HEADER = """# nThread 2 nGpus 1 minBytes 8 maxBytes 8 step: 1048576(bytes) warmup iters: 5 iters: 20 validation: 1
#
# Using devices
#   Rank  0 Pid  33 on  dgx device  0 [0x07] Tesla V100
#   Rank  1 Pid  34 on  dgx device  1 [0x0a] Tesla V100
#
#                                                     out-of-place                       in-place
#       size         count    type   redop     time   algbw   busbw  error     time   algbw   busbw  error
#        (B)    (elements)                     (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
"""


@pytest.mark.parametrize(
    ("row", "op", "time_ns"),
    [
        ("1024 256 float sum 11.1 0.1 0.1 0e+00 10.2 0.1 0.1 0e+00", "all_reduce", 10_200),
        ("1024 256 float sum 0 11.1 0.1 0.1 0e+00 10.2 0.1 0.1 0e+00", "reduce", 10_200),
        ("1024 128 float sum 11.1 0.1 0.1 0e+00 10.2 0.1 0.1 0e+00", "reduce_scatter", 11_100),
        ("1024 256 float none 0 11.1 0.1 0.1 0e+00 10.2 0.1 0.1 0e+00", "broadcast", 10_200),
    ],
)
def test_an_old_log_without_a_name_tells_its_op_by_the_row(row: str, op: str, time_ns: int) -> None:
    (found,) = parse_nccl_tests_log(OLD_HEADER + row + "\n")
    assert (found.op, found.transfer_ns, found.n_ranks) == (op, time_ns, 2)


def test_an_old_all_gather_must_be_named() -> None:
    # Count of one rank's part, no redop: an all-gather prints it as an all-to-all does.
    row = "    1024      128   float            11.1   0.1   0.1  0e+00     10.2   0.1   0.1  0e+00\n"
    with pytest.raises(UsageError, match="does not say which test"):
        parse_nccl_tests_log(OLD_HEADER + row)
    assert parse_nccl_tests_log(OLD_HEADER + row, op="all_gather")[0].transfer_ns == 11_100
    (found,) = parse_nccl_tests_log("$ ./build/alltoall_perf -b 8 -g 2\n" + OLD_HEADER + row)
    assert found.op == "all_to_all"


def test_extra_columns_and_timestamps() -> None:
    header = HEADER.replace(
        "time   algbw   busbw  #wrong     time   algbw   busbw  #wrong",
        "time algbw busbw #wrong i_min i_max i_p99 i_cv% time algbw busbw #wrong i_min i_max i_p99 i_cv% timestamp",
    )
    row = "8 2 float sum -1 9.5 0.0 0.0 0 8 11 11 3.1 7.5 0.0 0.0 0 7 9 9 2.2 2026-07-01 12:00:00\n"
    (found,) = parse_nccl_tests_log(log("all_reduce_perf", row, header=header))
    assert found.transfer_ns == 7_500


def test_a_missing_out_of_place_half_leaves_the_in_place_time() -> None:
    row = "        1024            16      half    none      -1                                     8.25    0.13    0.11       0\n"
    (found,) = parse_nccl_tests_log(log("all_gather_perf", row))
    assert found.transfer_ns == 8_250


def test_launcher_tags_and_noise_are_passed_over() -> None:
    tagged = "".join(f"[1,0]<stdout>:{line}\n" for line in ALL_REDUCE.splitlines())
    labelled = "".join(f"0: {line}\n" for line in ALL_REDUCE.splitlines())
    noisy = ALL_REDUCE.replace("# Using devices", "node1:77:77 [0] NCCL INFO Bootstrap\n# Using devices")
    for text in (tagged, labelled, noisy):
        assert parse_nccl_tests_log(text) == parse_nccl_tests_log(ALL_REDUCE)


def test_a_split_test_is_a_group_of_its_own_size() -> None:
    split = ranks(8).replace("Group  0", "Group  1", 4)
    assert parse_nccl_tests_log(ALL_REDUCE.replace(ranks(8), split))[0].n_ranks == 4


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no nccl-tests result rows"),
        ("mpirun: command not found\n", "no nccl-tests result rows"),
        (ALL_REDUCE.replace(HEADER, ""), "header"),
        (ALL_REDUCE.replace(ranks(8), ""), "Rank"),
        (ALL_REDUCE.replace("   time", "cputime"), "CPU times"),
        (ALL_REDUCE.replace("HBM3\n", "HBM3...\n", 1), "cut its rank list"),
        (ALL_REDUCE.replace("15.31", "nan").replace("15.52", "N/A"), "no time"),
        (
            ALL_REDUCE.replace("sum      -1    15.52    0.00    0.00       0    15.31    0.00", ""),
            "do not fit",
        ),
    ],
)
def test_what_cannot_be_read_is_said_with_its_line(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message) as error:
        parse_nccl_tests_log(text, where="my.log")
    assert str(error.value).startswith("my.log")


def test_a_log_file(tmp_path: Path) -> None:
    file = tmp_path / "ar.log"
    file.write_text(ALL_REDUCE)
    assert read_nccl_tests_log(file) == parse_nccl_tests_log(ALL_REDUCE)
