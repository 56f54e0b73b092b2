"""The CPU stand-in for CUDA: a CUDA-only program finds what it asks for, and torch is as it was after."""

from __future__ import annotations

import importlib.util
import math
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.amp.autocast_mode
import torch.utils.checkpoint
from torch.overrides import TorchFunctionMode

from ranklens_core import cpu_cuda
from ranklens_core.errors import UsageError

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the stand-in is for hosts without a GPU")

ON_DEVICE = torch.device("cpu", 0)
ON_HOST = torch.device("cpu")


@pytest.fixture
def stand_in() -> Iterator[None]:
    cpu_state = torch.get_rng_state()
    with cpu_cuda.cpu_cuda():
        yield
    torch.set_rng_state(cpu_state)


needs_stand_in = pytest.mark.usefixtures("stand_in")


def drawn(seed: int, *shape: int) -> torch.Tensor:
    """What a fresh CPU generator with ``seed`` draws first: the stand-in's numbers, by another way."""
    return torch.rand(shape, generator=torch._C.Generator().manual_seed(seed))


# --- install and remove


def _everything_of_torch() -> dict[tuple[str, str], object]:
    """Every attribute of every torch module, and of the classes that are patched."""
    places: dict[str, Any] = {n: m for n, m in sys.modules.items() if n == "torch" or n.startswith("torch.")}
    for owner in (
        torch.Tensor,
        torch.amp.autocast_mode.autocast,
        torch.utils.checkpoint.DefaultDeviceType,
        threading.Thread,
    ):
        places[owner.__name__] = owner
    return {(place, name): value for place, owner in places.items() for name, value in vars(owner).items()}


def test_removing_leaves_every_attribute_as_it_was() -> None:
    before, environment = _everything_of_torch(), dict(os.environ)
    cpu_cuda.install()
    during = _everything_of_torch()
    cpu_cuda.remove()
    after = _everything_of_torch()

    assert sum(during.get(key) is not value for key, value in before.items()) > 50
    assert [key for key in before.keys() | after.keys() if before.get(key) is not after.get(key)] == []
    assert dict(os.environ) == environment


def test_install_and_remove_are_idempotent() -> None:
    cpu_cuda.remove()
    assert not cpu_cuda.is_installed()
    cpu_cuda.install()
    try:
        installed = torch.cuda.current_stream
        cpu_cuda.install()
        assert torch.cuda.current_stream is installed
        assert cpu_cuda.is_installed()
    finally:
        cpu_cuda.remove()
    cpu_cuda.remove()
    assert not cpu_cuda.is_installed()
    assert not torch.cuda.is_available()


def test_an_inner_block_leaves_the_outer_one_in_place() -> None:
    with cpu_cuda.cpu_cuda():
        with cpu_cuda.cpu_cuda():
            assert torch.cuda.is_available()
        assert torch.cuda.is_available()
    assert not torch.cuda.is_available()


def test_it_is_removed_from_beneath_a_mode_of_the_program() -> None:
    class Mode(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    cpu_cuda.install()
    mode = Mode()
    with mode:
        cpu_cuda.remove()
        assert torch.overrides._get_current_function_mode_stack() == [mode]
    assert torch.overrides._get_current_function_mode_stack() == []


@needs_stand_in
def test_removing_in_another_thread_is_refused_and_changes_nothing() -> None:
    errors: list[UsageError] = []

    def remove() -> None:
        try:
            cpu_cuda.remove()
        except UsageError as error:
            errors.append(error)

    thread = threading.Thread(target=remove)
    thread.start()
    thread.join()
    assert len(errors) == 1
    assert "another thread" in str(errors[0])
    assert torch.zeros(1, device="cuda").is_cuda


def test_it_is_refused_where_there_is_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(UsageError, match=r"torch sees 2 here.*CUDA_VISIBLE_DEVICES"):
        cpu_cuda.install()
    assert not cpu_cuda.is_installed()


def test_a_failing_install_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ranklens_core.cpu_cuda.autocast.install", lambda patches: 1 // 0)
    before = dict(vars(torch.cuda))
    with pytest.raises(ZeroDivisionError):
        cpu_cuda.install()
    assert not cpu_cuda.is_installed()
    assert dict(vars(torch.cuda)) == before


# --- devices


CUDA_NAMES = ["cuda", "cuda:3", torch.device("cuda"), torch.device("cuda", 1), 0, 5]


@needs_stand_in
@pytest.mark.parametrize("device", CUDA_NAMES)
def test_every_name_of_a_cuda_device_is_understood(device: Any) -> None:
    on_host = torch.zeros(2)
    on_device = torch.ones(3, device="cuda")
    made = [
        torch.zeros(2, device=device),
        torch.tensor([1, 2], device=device, pin_memory=True),
        torch.as_tensor([1.0], dtype=torch.float32, device=device),
        torch.empty_like(on_host, device=device),
        on_host.new_zeros(2, device=device),
        on_host.to(device),
        on_host.to(device=device, dtype=torch.float16),
        on_host.to(device, torch.float64, non_blocking=True),
        on_host.cuda(device),
        on_device.to(device),
        torch.nn.Linear(2, 2, device=device).weight,
        torch.nn.Linear(2, 2).to(device).weight,
    ]
    assert [tensor.is_cuda for tensor in made] == [True] * len(made)
    assert {tensor.device for tensor in made} == {ON_DEVICE}
    assert made[6].dtype is torch.float16
    assert made[7].dtype is torch.float64


@needs_stand_in
def test_what_a_program_makes_without_a_device_is_on_the_host() -> None:
    made = [
        torch.zeros(2),
        torch.tensor([1.0]),
        torch.ones(2, device="cpu"),
        torch.from_numpy(np.zeros(2)),
        torch.zeros_like(torch.ones(2)),
        torch.ones(2).new_empty(3),
        torch.zeros(2, device="cuda").cpu(),
        torch.zeros(2, device="cuda").to("cpu"),
        torch.zeros(2, device="cuda").to(torch.device("cpu"), torch.float16),
        torch.zeros_like(torch.zeros(2, device="cuda"), device="cpu"),
        torch.zeros(4)[1:],
        torch.zeros(4, device="cuda").pin_memory(),
    ]
    assert [tensor.is_cuda for tensor in made] == [False] * len(made)
    assert {tensor.device for tensor in made} == {ON_HOST}


@needs_stand_in
def test_results_and_new_tensors_follow_a_tensor_on_the_device() -> None:
    x = torch.ones(4, device="cuda")
    followers = [x * 2, x[1:], x.float(), torch.nn.Parameter(x), torch.zeros_like(x), x.new_zeros(2)]
    followers += [x.detach(), torch.zeros(3, device=x.device)]
    assert [tensor.is_cuda for tensor in followers] == [True] * len(followers)


@needs_stand_in
def test_moves_to_the_other_side_copy_and_to_the_own_side_do_not() -> None:
    host = torch.zeros(2)
    device = host.cuda()
    device += 1
    back = device.cpu()
    device += 1
    assert (host.tolist(), device.tolist(), back.tolist()) == ([0, 0], [2, 2], [1, 1])
    assert device.cuda() is device
    assert device.to("cuda") is device
    assert back.cpu() is back
    assert back.to("cpu") is back


@needs_stand_in
def test_gradients_pass_through_moves() -> None:
    x = torch.ones(2, requires_grad=True)
    (x.cuda() * 3).cpu().sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [3.0, 3.0]


@needs_stand_in
def test_memory_of_numpy_is_copied_to_the_device() -> None:
    array = np.zeros(2, dtype=np.float32)
    torch.from_numpy(array).cuda().fill_(1)
    assert array.tolist() == [0, 0]


@needs_stand_in
def test_default_device() -> None:
    with torch.device("cuda"):
        assert torch.zeros(1).is_cuda
        assert not torch.zeros(1, device="cpu").is_cuda
    assert not torch.zeros(1).is_cuda
    torch.set_default_device("cuda:1")
    try:
        assert torch.arange(3).is_cuda
    finally:
        torch.set_default_device(None)


@needs_stand_in
def test_type_names_and_legacy_constructors() -> None:
    module = torch.nn.Linear(2, 2)
    assert module.weight.type() == "torch.FloatTensor"
    module.cuda()
    assert module.weight.type() == "torch.cuda.FloatTensor"
    assert module.bfloat16().weight.type() == "torch.cuda.BFloat16Tensor"
    half = torch.ones(2).type("torch.cuda.HalfTensor")
    assert (half.dtype, half.is_cuda) == (torch.float16, True)
    assert torch.ones(2, device="cuda").type(torch.int64).dtype is torch.int64
    cuda: Any = torch.cuda
    assert cuda.FloatTensor([1, 2]).dtype is torch.float32
    assert cuda.IntTensor(3).dtype is torch.int32
    assert isinstance(torch.ones(1, device="cuda"), cuda.FloatTensor)


@needs_stand_in
def test_the_current_device_is_the_one_that_was_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert torch.cuda.device_count() == 4
    assert torch.cuda.current_device() == 0
    torch.cuda.set_device(2)
    assert torch.cuda.current_device() == 2
    assert torch.zeros(1, device=torch.cuda.current_device()).is_cuda
    assert torch.zeros(1, device=f"cuda:{torch.cuda.current_device()}").is_cuda
    with torch.cuda.device(1):
        assert torch.cuda.current_device() == 1
    with torch.cuda.device("cuda:3"):
        assert torch.cuda.current_device() == 3
    with torch.cuda.device_of(torch.zeros(1)):
        assert torch.cuda.current_device() == 2
    torch.cuda.set_device(torch.device("cuda", 1))
    assert torch.cuda.current_device() == 1


@needs_stand_in
def test_what_cannot_know_of_the_stand_in_gets_a_device_and_not_an_index() -> None:
    with torch._C.DisableTorchFunction():
        assert torch.zeros(1, device=torch.cuda.current_device()).numel() == 1


@needs_stand_in
def test_device_queries() -> None:
    properties = torch.cuda.get_device_properties(torch.device("cuda:0"))
    assert torch.cuda.is_available()
    assert torch.cuda.is_initialized()
    assert (properties.major, properties.minor) == torch.cuda.get_device_capability() == (8, 0)
    assert properties.name == torch.cuda.get_device_name(0)
    assert torch.cuda.is_bf16_supported()
    free, total = torch.cuda.mem_get_info()
    installed = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < free <= total == properties.total_memory == installed


@needs_stand_in
def test_memory_figures_follow_the_process() -> None:
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    block = torch.ones(2**23, device="cuda")  # 32 MiB, touched
    grown = torch.cuda.memory_allocated() - before
    assert 0.9 * block.nbytes < grown < 2 * block.nbytes
    assert torch.cuda.max_memory_allocated() >= before + grown
    stats = torch.cuda.memory_stats()
    assert stats["allocated_bytes.all.current"] > before
    assert stats["num_ooms"] == 0
    torch.cuda.empty_cache()


@needs_stand_in
@pytest.mark.parametrize("reentrant", [False, True])
def test_backward_passes_and_their_hooks_find_the_device(reentrant: bool) -> None:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * torch.full_like(x, 2, device=torch.cuda.current_device())

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return grad * torch.tensor(2.0, device=torch.cuda.current_device())

    def block(x: torch.Tensor) -> torch.Tensor:
        return Double.apply(x) + torch.ones(2, device="cuda")  # type: ignore[no-untyped-call, no-any-return]

    def checkpointed(x: torch.Tensor) -> torch.Tensor:
        return torch.utils.checkpoint.checkpoint(block, x, use_reentrant=reentrant)  # type: ignore[no-any-return]

    x = torch.ones(2, device="cuda", requires_grad=True)
    hooked: list[bool] = []
    x.register_hook(lambda grad: hooked.append(torch.zeros(1, device="cuda").is_cuda))
    checkpointed(x).sum().backward()
    torch.autograd.backward(checkpointed(x).sum())
    assert x.grad is not None
    assert x.grad.tolist() == [4.0, 4.0]
    assert hooked == [True, True]
    (grad,) = torch.autograd.grad(block(x).sum(), x)
    assert grad.tolist() == [2.0, 2.0]


@needs_stand_in
def test_threads_find_the_device() -> None:
    found: list[bool] = []

    class Worker(threading.Thread):
        def run(self) -> None:
            found.append(torch.zeros(1, device="cuda").is_cuda)

    for thread in (Worker(), threading.Thread(target=lambda: found.append(torch.ones(1).cuda().is_cuda))):
        thread.start()
        thread.join()
    assert found == [True, True]


@needs_stand_in
def test_load_puts_cuda_tensors_on_the_device(tmp_path: Path) -> None:
    torch.save({"weight": torch.arange(3)}, tmp_path / "checkpoint.pt")
    for map_location in ("cuda", torch.device("cuda", 1), {"cpu": "cuda:0"}):
        loaded = torch.load(tmp_path / "checkpoint.pt", map_location=map_location)
        assert loaded["weight"].tolist() == [0, 1, 2]
        assert loaded["weight"].is_cuda


@needs_stand_in
def test_a_compiled_function_runs_as_it_is() -> None:
    frames: list[str] = []

    @torch.compile
    def function() -> torch.Tensor:
        frames.append(sys._getframe().f_code.co_name)
        return torch.zeros(1, device="cuda")

    assert function().is_cuda
    assert function().is_cuda
    assert frames == ["function", "function"]


# --- random numbers


@needs_stand_in
def test_seeding_the_device_seeds_what_it_draws() -> None:
    for seed in (torch.cuda.manual_seed, torch.cuda.manual_seed_all, torch.manual_seed):
        seed(5)
        assert torch.equal(torch.rand(4, device="cuda"), drawn(5, 4))
        seed(5)
        assert torch.equal(torch.empty(4, device="cuda").uniform_(), drawn(5, 4))
    assert torch.cuda.initial_seed() == 5


def test_a_seed_set_before_installing_counts() -> None:
    state = torch.get_rng_state()
    torch.manual_seed(11)
    torch.rand(7)
    with cpu_cuda.cpu_cuda():
        assert torch.equal(torch.rand(3, device="cuda"), drawn(11, 3))
    torch.set_rng_state(state)


def _attention(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=0.5)


DEVICE_DRAWS: dict[str, Callable[[], object]] = {
    "rand": lambda: torch.rand(4, device="cuda"),
    "randn": lambda: torch.randn(4, device=0),
    "randperm": lambda: torch.randperm(9, device="cuda"),
    "rand_like": lambda: torch.rand_like(torch.zeros(4, device="cuda")),
    "normal_": lambda: torch.empty(4, device="cuda").normal_(),
    "init": lambda: torch.nn.init.xavier_uniform_(torch.empty(4, 4, device="cuda")),
    "linear": lambda: torch.nn.Linear(4, 4, device="cuda").weight,
    "dropout": lambda: torch.nn.functional.dropout(torch.ones(64, device="cuda")),
    "module": lambda: torch.nn.Dropout(0.5)(torch.ones(64).cuda() * 2),
    "attention": lambda: _attention(torch.ones(1, 1, 8, 8, device="cuda")),
    "multinomial": lambda: torch.multinomial(torch.ones(32, device="cuda"), 16),
    "bernoulli": lambda: torch.bernoulli(torch.full((64,), 0.5, device="cuda")),
}


@needs_stand_in
@pytest.mark.parametrize("draw", DEVICE_DRAWS.values(), ids=DEVICE_DRAWS.keys())
def test_the_device_draws_from_a_stream_of_its_own(draw: Callable[[], Any]) -> None:
    torch.manual_seed(1)
    cpu_state = torch.get_rng_state()
    first, second = draw(), draw()
    assert torch.equal(torch.get_rng_state(), cpu_state)
    assert not torch.equal(first, second)
    torch.rand(100)
    torch.cuda.manual_seed(1)
    assert torch.equal(draw(), first)
    assert torch.equal(draw(), second)


@needs_stand_in
def test_the_host_draws_what_it_draws_without_the_stand_in() -> None:
    def draws() -> list[torch.Tensor]:
        torch.manual_seed(3)
        return [
            torch.rand(3),
            torch.empty(3).normal_(),
            torch.nn.Linear(3, 3).weight,
            torch.randperm(9),
            torch.nn.functional.dropout(torch.ones(32)),
            torch.rand(3, device="cpu"),
        ]

    with_it = draws()
    device_state = torch.cuda.get_rng_state()
    cpu_cuda.remove()
    without = draws()
    cpu_cuda.install()
    assert [torch.equal(a, b) for a, b in zip(with_it, without, strict=True)] == [True] * 6
    torch.manual_seed(3)
    assert torch.equal(torch.cuda.get_rng_state(), device_state)


@needs_stand_in
def test_an_own_generator_is_used_and_no_other() -> None:
    generator = torch.Generator(device="cuda").manual_seed(7)
    assert isinstance(generator, torch.Generator)
    assert isinstance(torch.default_generator, torch.Generator)
    before = torch.cuda.get_rng_state()
    assert torch.equal(torch.rand(3, device="cuda", generator=generator), drawn(7, 3))
    assert torch.equal(torch.cuda.get_rng_state(), before)


@needs_stand_in
def test_states_are_read_and_set_by_every_door(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    torch.cuda.manual_seed(9)
    state = torch.cuda.get_rng_state("cuda:1")
    everywhere = torch.cuda.get_rng_state_all()
    generators = torch.cuda.default_generators
    assert len(everywhere) == len(generators) == len(list(generators)) == 2
    restore: list[Callable[[], object]] = [
        lambda: torch.cuda.set_rng_state(state),
        lambda: torch.cuda.random.set_rng_state(state, device=torch.device("cuda")),
        lambda: torch.cuda.set_rng_state_all(everywhere),
        lambda: generators[torch.cuda.current_device()].set_state(state),
        lambda: generators[ON_HOST].manual_seed(9),
    ]
    for door in restore:
        door()
        assert torch.equal(torch.rand(3, device="cuda"), drawn(9, 3))
    torch.cuda.manual_seed(9)
    with torch.random.fork_rng(devices=[0]):
        torch.rand(50, device="cuda")
    assert torch.equal(torch.rand(3, device="cuda"), drawn(9, 3))


@needs_stand_in
def test_an_error_while_drawing_gives_both_streams_back() -> None:
    torch.manual_seed(2)
    cpu_state = torch.get_rng_state()
    with pytest.raises(RuntimeError):
        torch.multinomial(torch.zeros(2, 2, 2, device="cuda"), 1)
    assert torch.equal(torch.get_rng_state(), cpu_state)
    assert torch.equal(torch.rand(2, device="cuda"), drawn(2, 2))


@needs_stand_in
@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputing_repeats_the_dropout(reentrant: bool) -> None:
    x = torch.ones(256, device="cuda", requires_grad=True)

    def block(value: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(value * value, 0.5)

    out = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=reentrant)
    torch.rand(10, device="cuda")
    after = torch.cuda.get_rng_state()
    out.sum().backward()
    assert x.grad is not None
    assert 0 < int((out == 0).sum()) < 256
    assert torch.equal(x.grad, 2 * out)  # d(m x^2)/dx at x = 1, for the mask m that `out` shows
    assert torch.equal(torch.cuda.get_rng_state(), after)


# --- streams, mixed precision, tools


@needs_stand_in
def test_streams() -> None:
    default, side = torch.cuda.default_stream(), torch.cuda.Stream(priority=-1)
    assert torch.cuda.current_stream() == default != side
    with torch.cuda.stream(side):
        assert torch.cuda.current_stream() is side
        with torch.cuda.stream(None):
            assert torch.cuda.current_stream() is side
        seen: list[object] = []
        thread = threading.Thread(target=lambda: seen.append(torch.cuda.current_stream()))
        thread.start()
        thread.join()
        assert seen == [default]  # streams are chosen per thread
    assert torch.cuda.current_stream() is default
    torch.cuda.set_stream(side)
    assert torch.cuda.current_stream() is side
    side.wait_stream(default)
    event = side.record_event()
    assert isinstance(event, torch.cuda.Event)
    assert side.record_event(event) is event
    event.wait(default)
    default.wait_event(event)
    assert event.query()
    assert side.query()
    side.synchronize()
    torch.cuda.synchronize()
    torch.zeros(1, device="cuda").record_stream(side)
    assert torch.cuda.ExternalStream(42).cuda_stream == 42


@needs_stand_in
def test_events_tell_the_time_between_them(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter([1_000_000, 3_500_000])
    clock = SimpleNamespace(monotonic_ns=lambda: next(ticks))
    monkeypatch.setattr("ranklens_core.cpu_cuda.streams.time", clock)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    with pytest.raises(UsageError, match="two recorded events"):
        start.elapsed_time(end)
    end.record()
    assert start.elapsed_time(end) == 2.5


@needs_stand_in
def test_autocast_of_cuda_works_on_the_cpu() -> None:
    a = torch.ones(2, 2, device="cuda")
    with torch.autocast("cuda"):
        assert torch.is_autocast_enabled()
        assert torch.get_autocast_gpu_dtype() is torch.float16
        assert (a @ a).dtype is torch.float16
        with torch.autocast("cuda", enabled=False):
            assert (a @ a).dtype is torch.float32
    with torch.amp.autocast("cuda", dtype=torch.bfloat16):
        assert torch.get_autocast_dtype("cuda") is torch.bfloat16
        assert (a @ a).dtype is torch.bfloat16
    assert not torch.is_autocast_enabled("cuda")
    assert torch.get_autocast_dtype("cuda") is torch.float16
    assert (a @ a).dtype is torch.float32


@needs_stand_in
def test_custom_functions_keep_their_autocast() -> None:
    seen: list[torch.dtype] = []

    class Product(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cuda")  # type: ignore[untyped-decorator]
        def forward(ctx: Any, a: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(a)
            return a @ a

        @staticmethod
        @torch.amp.custom_bwd(device_type="cuda")  # type: ignore[untyped-decorator]
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            (a,) = ctx.saved_tensors
            seen.append((a @ a).dtype)
            return grad.float()

    class Cast(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cuda", cast_inputs=torch.float32)  # type: ignore[untyped-decorator]
        def forward(ctx: Any, a: torch.Tensor) -> torch.Tensor:
            seen.append(a.dtype)
            return a.clone()

    a = torch.ones(2, 2, device="cuda", requires_grad=True)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        out = Product.apply(a)  # type: ignore[no-untyped-call]
        Cast.apply(a.detach().half())  # type: ignore[no-untyped-call]
    out.sum().backward()
    assert seen == [torch.float32, torch.bfloat16]


@needs_stand_in
def test_the_gradient_scaler_scales() -> None:
    parameter = torch.nn.Parameter(torch.ones(2, device="cuda"))
    optimizer = torch.optim.SGD([parameter], lr=0.5)
    scaler = torch.amp.GradScaler("cuda", init_scale=8.0)
    scaler.scale(parameter.sum()).backward()
    assert parameter.grad is not None
    assert parameter.grad.tolist() == [8.0, 8.0]
    scaler.step(optimizer)
    scaler.update()
    assert parameter.tolist() == [0.5, 0.5]


@needs_stand_in
def test_marks_for_profilers_are_accepted() -> None:
    assert torch.cuda.nvtx.range_push("outer") == 0
    with torch.cuda.nvtx.range("inner"):
        torch.cuda.nvtx.mark("here")
    assert torch.cuda.nvtx.range_pop() == 0
    torch.cuda.nvtx.range_end(torch.cuda.nvtx.range_start("other"))
    torch.cuda.check_error(torch.cuda.cudart().cudaProfilerStart())
    torch.cuda.check_error(torch.cuda.cudart().cudaProfilerStop())
    torch.cuda.profiler.start()
    torch.cuda.profiler.stop()


@needs_stand_in
def test_what_has_no_counterpart_says_so() -> None:
    refused: dict[str, Callable[[], object]] = {
        "CUDA graphs.*torch.cuda.CUDAGraph": torch.cuda.CUDAGraph,
        "CUDA graphs.*graph_pool_handle": torch.cuda.graph_pool_handle,
        "memory pools.*MemPool": torch.cuda.MemPool,
        "memory snapshots.*_record_memory_history": torch.cuda.memory._record_memory_history,
    }
    for message, call in refused.items():
        with pytest.raises(UsageError, match=message):
            call()
    assert not torch.cuda.is_current_stream_capturing()


# --- Megatron

MEGATRON_RANK = """
import os, runpy, sys
os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="0",
                  TP="1", PP="1", STEPS="2")
case, order = sys.argv[1:]
if order == "import first":
    import megatron.core
from ranklens_core import cpu_cuda
cpu_cuda.install()
runpy.run_path(case, run_name="__main__")
"""

MEGATRON_TRACKER = """
import logging
import torch
from ranklens_core import cpu_cuda
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker, checkpoint

def drawn(seed, *counts):
    generator = torch.Generator().manual_seed(seed)
    return [torch.rand(count, generator=generator).tolist() for count in counts]

warned = []
logging.getLogger("megatron.core.tensor_parallel.random").warning = warned.append
with cpu_cuda.cpu_cuda():
    tracker = CudaRNGStatesTracker()
    torch.cuda.manual_seed(1)
    tracker.add("tp", 2)
    tracker.add("expert", 3)
    rand = lambda count: torch.rand(count, device=torch.cuda.current_device()).tolist()
    outside = [rand(2)]
    with tracker.fork("tp"):
        tp = [rand(3)]
        with tracker.fork("expert"):
            expert = [rand(4)]
        tp.append(rand(3))
    outside.append(rand(2))
    saved = tracker.get_states()
    with tracker.fork("tp"):
        tp.append(rand(3))
    assert outside == drawn(1, 2, 2), "the default stream"
    assert tp == drawn(2, 3, 3, 3), "a forked stream goes on where it was"
    assert expert == drawn(3, 4), "a nested fork"
    tracker.set_states(dict(saved))
    with tracker.fork("tp"):
        assert rand(3) == tp[2], "states restored"
        x = torch.ones(64, device="cuda")
        first = torch.nn.functional.dropout(x)
    tracker.set_states(dict(saved))
    with tracker.fork("tp"):
        rand(3)
        assert torch.equal(torch.nn.functional.dropout(x), first), "dropout follows the forked stream"
    assert warned == [], warned
print("done")
"""

needs_megatron = pytest.mark.skipif(
    importlib.util.find_spec("megatron.core") is None if importlib.util.find_spec("megatron") else True,
    reason="megatron-core is not installed",
)


@needs_megatron
def test_megatrons_rng_tracker(run_python: Callable[..., Any]) -> None:
    result = run_python(MEGATRON_TRACKER)
    assert (result.returncode, result.stdout) == (0, "done\n"), result.stderr


@needs_megatron
def test_a_megatron_program_repeats_itself(cases_dir: Path, run_python: Callable[..., Any]) -> None:
    """Also: megatron.core may be imported before the stand-in is there, or after."""
    case = cases_dir / "megatron_gpt.py"
    first, second = (run_python(MEGATRON_RANK, case, order) for order in ("import first", "install first"))
    assert first.returncode == 0, first.stderr
    assert second.returncode == 0, second.stderr
    numbers = [float(number) for number in re.findall(r"(?:loss|grad_norm) (\S+)", first.stdout)]
    assert len(numbers) == 4
    assert all(math.isfinite(number) and number > 0 for number in numbers)
    assert second.stdout == first.stdout
