"""A network inside a trace: the same estimates without any file, and nothing else is believed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ranklens_core.errors import TraceDamagedError, UsageError
from ranklens_core.timing.estimate import Estimator
from ranklens_core.timing.network import load_network
from ranklens_core.timing.network_content import network_content, recorded_estimator

LOG = """# nThread 1 nGpus 1 minBytes 8 maxBytes 16
# Using devices
#  Rank  0 Group  0 Pid   1 on node0 device  0 [0x00] NVIDIA H100
#  Rank  1 Group  0 Pid   2 on node0 device  1 [0x00] NVIDIA H100
#                                                       out-of-place                       in-place
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
        1024           256     float     sum      -1    10.00    0.10    0.10      0    11.00    0.10    0.10      0
        2048           512     float     sum      -1    12.00    0.10    0.10      0    13.00    0.10    0.10      0
"""  # noqa: E501


@pytest.mark.parametrize("name", ["loopback", "h100-ib400", "l40s"])
@pytest.mark.parametrize("bandwidth", [1.0, 0.5])
def test_the_estimates_are_the_networks(name: str, bandwidth: float) -> None:
    network = load_network(name).scaled(bandwidth=bandwidth)
    recorded = recorded_estimator(network_content(network))
    here = Estimator(network)
    for op, ranks, nbytes in (("all_reduce", range(8), 1 << 20), ("send", (0, 1), 4096)):
        assert recorded.estimate(op, tuple(ranks), nbytes, nbytes) == here.estimate(
            op, tuple(ranks), nbytes, nbytes
        )


def test_what_the_users_logs_measured_is_in_it_and_the_files_are_not(tmp_path: Path) -> None:
    (tmp_path / "mine.log").write_text(LOG)
    file = tmp_path / "mine.yaml"
    file.write_text(
        "name: mine\ndescription: d\nnode: h100\nnccl_tests_logs:\n  - path: mine.log\n    op: all_reduce\n"
    )
    content = network_content(load_network(file))
    (tmp_path / "mine.log").unlink()
    estimate = recorded_estimator(content).estimate("all_reduce", (0, 1), 1024, 1024, "float32")
    assert (estimate.transfer_ns, estimate.source) == (11_000, "measured all_reduce, 2 ranks on 1 node(s)")
    assert "mine.log" not in content
    with pytest.raises(UsageError, match="cannot read the nccl-tests log"):
        network_content(load_network(file))


def changed(**values: object) -> str:
    content = json.loads(network_content(load_network("loopback")))
    content["network"].update(values)
    return json.dumps(content)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[]", "expected keys and values"),
        ("{}", "missing key 'network'"),
        (changed(nccl_tests_logs=[{"path": "/etc/passwd", "op": "all_reduce"}]), "names files"),
        (changed(node="h100"), "expected keys and values"),
        (changed(surprise=1), "unknown key 'network.surprise'"),
        (changed(node={"name": "n", "ranks_per_node": -1, "link": "loopback"}), "must be above 0"),
    ],
)
def test_a_crafted_network_is_refused(content: str, says: str) -> None:
    with pytest.raises(TraceDamagedError, match=says):
        recorded_estimator(content)
