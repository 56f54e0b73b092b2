"""Results nobody recorded: what uniform peers would have sent, finite, and the same in every run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fake_world import fake_world
from torch._C._distributed_c10d import ProcessGroup, Work

from ranklens_core.c10d.call import Call, Proceed
from ranklens_core.c10d.interpose import install
from ranklens_core.c10d.ops import Returns
from ranklens_core.c10d.synthesise import NOISE_SCALE, Synthesiser
from ranklens_core.c10d.unwritten import MAKERS, Unwritten
from ranklens_core.c10d.work import completed_work
from ranklens_core.patches import Patches


class Synthesising:
    """A handler that makes up every result."""

    def __init__(self) -> None:
        self.synthesiser = Synthesiser()
        self.set_up = False

    def handle(self, call: Call, proceed: Proceed) -> Work | None:
        self.synthesiser.fill(call, set_up=self.set_up)
        return None if call.operator.returns is Returns.NOTHING else completed_work(call.result, call.device)

    def on_wait(self, work: Work, wait: Callable[[], bool]) -> bool:
        return wait()

    def on_wait_tensor(self, tensor: torch.Tensor, wait: Callable[[], torch.Tensor]) -> torch.Tensor:
        return wait()

    def start_batch(self, pg: ProcessGroup) -> None: ...

    def end_batch(self, pg: ProcessGroup, proceed: Proceed) -> Work | None:
        return proceed()


@pytest.fixture
def handler() -> Iterator[Synthesising]:
    """In place, as rank 1 of 4."""
    made = Synthesising()
    with fake_world(1, 4):
        interposer = install(made)
        try:
            yield made
        finally:
            interposer.remove()


OP = dist.ReduceOp


@pytest.mark.parametrize(
    ("op", "value", "dtype", "result"),
    [
        (OP.SUM, 3, torch.float32, 12),
        (OP.SUM, 3, torch.bfloat16, 12),
        (OP.AVG, 3, torch.float32, 3),
        (OP.PRODUCT, 2, torch.int64, 16),
        (OP.MIN, 3, torch.float32, 3),
        (OP.MAX, 3, torch.float32, 3),
        (OP.BAND, 6, torch.int32, 6),
        (OP.BOR, 6, torch.int32, 6),
        (OP.BXOR, 6, torch.int32, 0),
    ],
)
def test_reductions(handler: Synthesising, op: Any, value: int, dtype: torch.dtype, result: int) -> None:
    tensor = torch.full((3,), value, dtype=dtype)
    dist.all_reduce(tensor, op)
    assert tensor.tolist() == [result] * 3
    tensor.fill_(value)
    dist.reduce(tensor, 1, op)
    assert tensor.tolist() == [result] * 3


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_reduce_scatter_takes_this_ranks_part(handler: Synthesising) -> None:
    out = torch.zeros(2)
    dist.reduce_scatter_tensor(out, torch.arange(8.0))
    assert out.tolist() == [8.0, 12.0]
    dist.reduce_scatter(out, [torch.full((2,), float(part)) for part in range(4)])
    assert out.tolist() == [4.0, 4.0]
    dist.reduce_scatter_tensor(out, torch.arange(8.0), OP.MAX)
    assert out.tolist() == [2.0, 3.0]


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_gathers_repeat_this_ranks_part(handler: Synthesising) -> None:
    own = torch.tensor([5.0, 6.0])
    parts = [torch.zeros(2) for _ in range(4)]
    dist.all_gather(parts, own)
    assert torch.stack(parts).tolist() == [[5.0, 6.0]] * 4
    whole = torch.zeros(4, 2)
    dist.all_gather_into_tensor(whole, own)
    assert whole.tolist() == [[5.0, 6.0]] * 4
    uneven = [torch.zeros(size) for size in (0, 1, 2, 3)]
    dist.all_gather(uneven, own)
    assert [part.tolist() for part in uneven] == [[], [5.0], [5.0, 6.0], [5.0, 6.0, 5.0]]
    lists = [[torch.zeros(2), torch.zeros(1)] for _ in range(4)]
    dist.all_gather_coalesced(lists, [own, torch.tensor([7.0])])
    assert [[tensor.tolist() for tensor in part] for part in lists] == [[[5.0, 6.0], [7.0]]] * 4


def test_all_to_all_by_the_own_splits(handler: Synthesising) -> None:
    out = torch.zeros(5)
    dist.all_to_all_single(out, torch.tensor([1.0, 2.0, 3.0]), [2, 1, 1, 1], [1, 1, 1, 0])
    assert out.tolist() == [1.0, 2.0, 3.0, 1.0, 2.0]
    receives = [torch.zeros(1) for _ in range(4)]
    dist.all_to_all(receives, [torch.tensor([float(peer)]) for peer in range(4)])
    assert torch.cat(receives).tolist() == [0.0, 1.0, 2.0, 3.0]
    nothing = torch.full((2,), 9.0)
    dist.all_to_all_single(nothing, torch.zeros(0), [2, 0, 0, 0], [0, 0, 0, 0])
    assert nothing.tolist() == [0.0, 0.0]


def test_a_root_keeps_its_own(handler: Synthesising) -> None:
    tensor = torch.tensor([1.0, 2.0])
    dist.broadcast(tensor, 1)
    assert tensor.tolist() == [1.0, 2.0]
    out = torch.zeros(1)
    dist.scatter(out, [torch.tensor([float(peer)]) for peer in range(4)], 1)
    assert out.tolist() == [1.0]


@pytest.mark.parametrize(
    "receive",
    [
        lambda tensor: dist.broadcast(tensor, 2),
        lambda tensor: dist.scatter(tensor, None, 2),
        lambda tensor: dist.irecv(tensor, 3),
        lambda tensor: dist.broadcast(tensor.t(), 2),
    ],
    ids=["broadcast", "scatter", "recv", "strided"],
)
def test_what_only_a_peer_knows_is_small_noise(
    handler: Synthesising, receive: Callable[[torch.Tensor], object]
) -> None:
    tensor = torch.full((64, 64), float("nan"))
    receive(tensor)
    assert tensor.isfinite().all()
    assert tensor.pow(2).mean().sqrt().item() == pytest.approx(NOISE_SCALE, rel=0.05)
    another = torch.full((64, 64), float("nan"))
    receive(another)
    assert not torch.equal(tensor, another)
    # token ids, say: zero is valid as any
    whole = torch.zeros(64, 64, dtype=torch.int64)
    receive(whole)
    assert not whole.any()


def test_a_broadcast_gives_what_this_rank_would_have_sent(handler: Synthesising) -> None:
    weight, sizes = torch.tensor([0.5, -2.0]), torch.tensor([3, 4])
    dist.broadcast(weight, 2)
    dist.broadcast(sizes, 2)
    assert (weight.tolist(), sizes.tolist()) == ([0.5, -2.0], [3, 4])
    nobody_wrote = torch.full((64,), 3e38)
    dist.broadcast(nobody_wrote, 2)
    assert nobody_wrote.abs().max() < 1


def test_a_broadcast_seen_as_bytes_keeps_the_parameter(handler: Synthesising) -> None:
    # DeepSpeed broadcasts parameters so
    weight = torch.randn(32, 32)
    before = weight.clone()
    dist.broadcast(weight.view(torch.uint8), 2)
    assert torch.equal(weight, before)


def test_a_message_is_like_what_was_sent_on_of_its_shape(handler: Synthesising) -> None:
    dist.send(torch.full((64, 64), 5.0), 2)
    dist.send(torch.tensor([2, 17, 32]), 2)
    activation, shape = torch.empty(64, 64), torch.empty(3, dtype=torch.int64)
    dist.recv(activation, 0)
    dist.recv(shape, 0)
    assert activation.std().item() == pytest.approx(5.0, rel=0.05)
    assert shape.tolist() == [2, 17, 32]
    # a gradient comes from where the activation went: it is not like that
    gradient = torch.empty(64, 64)
    dist.recv(gradient, 2)
    assert gradient.std().item() == pytest.approx(NOISE_SCALE, rel=0.05)


def test_a_stage_that_amplifies_is_not_fed_its_own_output(handler: Synthesising) -> None:
    activation = torch.empty(64, 64)
    for _ in range(2000):
        dist.recv(activation, 0)
        dist.send(activation * 3, 2)
    assert activation.std().item() == pytest.approx(3 * NOISE_SCALE, rel=0.05)


def test_what_an_adapter_knows_of_a_peer_is_received(handler: Synthesising) -> None:
    shape, ours = torch.empty(4, dtype=torch.int32), torch.tensor([-1, -1])
    with handler.synthesiser.peers.sending(torch.tensor([2, 17])):
        dist.recv(shape, 0)
        dist.broadcast(ours, 2)
    assert (shape.tolist(), ours.tolist()) == ([2, 17, 0, 0], [2, 17])
    dist.broadcast(ours.fill_(-1), 2)
    assert ours.tolist() == [-1, -1]


def test_truth_values_and_8_bit_floats_are_summed(handler: Synthesising) -> None:
    flags, small = torch.tensor([True, False]), torch.tensor([1.5, -2.0]).to(torch.float8_e4m3fn)
    dist.all_reduce(flags)
    dist.all_reduce(small)
    assert flags.tolist() == [True, False]
    assert small.float().tolist() == [6.0, -8.0]


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_an_own_part_that_lies_in_the_gathered_whole(handler: Synthesising) -> None:
    whole = torch.tensor([0.0, 0.0, 5.0, 6.0, 0.0, 0.0, 0.0, 0.0])
    dist.all_gather_into_tensor(whole, whole[2:4])
    assert whole.tolist() == [5.0, 6.0] * 4
    # a sharded optimizer's parameters: those of the other ranks are there from the start
    whole[2:4] = 7.0
    dist.all_gather_into_tensor(whole, whole[2:4])
    assert whole.tolist() == [5.0, 6.0, 7.0, 7.0, 5.0, 6.0, 5.0, 6.0]


def test_fresh_buffers_are_zero_and_told_from_parameters(handler: Synthesising) -> None:
    with Patches() as patches:
        handler.synthesiser = Synthesiser(unwritten=Unwritten(patches))
        tokens, mask = torch.empty(64, 64, dtype=torch.int64), torch.empty(64, 64)
        again = torch.randn(3, 3).new_empty(5)
        bias = torch.empty(64, 64).fill_(1.0)
        flag = torch.zeros(1)
        assert not tokens.any()
        assert not mask.any()
        assert not again.any()
        for tensor in (tokens, mask, bias, flag):
            dist.broadcast(tensor, 2)
        assert not tokens.any()
        assert (mask > 0).all()  # it may be what a loss is divided by
        assert (bias == 1).all()
        assert flag.item() == 0
    assert all(getattr(owner, name).__name__ != "made_zero" for owner, name in MAKERS)


def test_values_do_not_depend_on_when_results_arrive(handler: Synthesising) -> None:
    received = [[torch.empty(8), torch.empty(8)] for _ in range(2)]
    for order, tensors in zip((1, -1), received, strict=True):
        handler.synthesiser = Synthesiser()
        waiting: list[Callable[[], None]] = []
        handler.synthesiser.fill = (  # type: ignore[method-assign]
            lambda call, set_up, waiting=waiting: waiting.append(handler.synthesiser.filling(call))
        )
        for tensor in tensors:
            dist.irecv(tensor, 0)
        for write in waiting[::order]:
            write()
    assert all(map(torch.equal, *received))
    assert not torch.equal(*received[0])


def test_a_parameter_that_is_another_ranks_is_no_zero(handler: Synthesising) -> None:
    handler.set_up = True
    tied, counter = torch.zeros(64, 64), torch.zeros(4)
    dist.all_reduce(tied)
    dist.all_reduce(counter)
    assert tied.std().item() == pytest.approx(4 * NOISE_SCALE, rel=0.05)
    assert not counter.any()
    handler.set_up = False
    gradient = torch.zeros(64, 64)
    dist.all_reduce(gradient)
    assert not gradient.any()


def test_noise_is_the_same_in_every_run_and_leaves_the_programs_random_state(
    handler: Synthesising,
) -> None:
    state = torch.get_rng_state()
    first = [torch.empty(3, 2, dtype=dtype) for dtype in (torch.float32, torch.bfloat16, torch.complex64)]
    for tensor in first:
        dist.irecv(tensor, 0)
    assert torch.equal(torch.get_rng_state(), state)
    handler.synthesiser = Synthesiser()
    for tensor in first:
        again = torch.empty_like(tensor)
        dist.irecv(again, 0)
        assert torch.equal(again, tensor)
    handler.synthesiser = Synthesiser(seed=1)
    other = torch.empty(3, 2)
    dist.irecv(other, 0)
    assert not torch.equal(other, first[0])


def test_leaf_that_needs_a_gradient_is_filled_in_silence(handler: Synthesising) -> None:
    leaf = torch.ones(3, requires_grad=True)
    dist.all_reduce(leaf)
    assert leaf.is_leaf
    assert leaf.tolist() == [4.0] * 3
