"""Kernels put in and taken out: every call reaches the handler, and torch is as before afterwards."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from fake_world import fake_world
from torch._C._distributed_c10d import (  # type: ignore[attr-defined] # torch's stubs lack the last
    ProcessGroup,
    Work,
    _create_work_from_future,
)
from torch.library import Library

from ranklens_core.c10d.call import Call, Proceed
from ranklens_core.c10d.groups import Groups
from ranklens_core.c10d.interpose import Interposer, install, is_installed
from ranklens_core.c10d.ops import Kind, Returns, operators
from ranklens_core.c10d.signature import Signatures
from ranklens_core.c10d.site import Sites
from ranklens_core.c10d.work import completed_work, failed_work, pending_work, wait_for
from ranklens_core.c10d.world import let_fake_groups_coalesce
from ranklens_core.clock import MonotonicClock
from ranklens_core.errors import UnknownOperatorError, UsageError
from ranklens_core.patches import Patches
from ranklens_core.recorder import Recorder, Values
from ranklens_core.schema import NO_PEER, CallRow, CompletionRow, WaitRow
from ranklens_core.steps import Steps

INTERPOSED = [*(f"c10d::{operator.name}" for operator in operators()), "_c10d_functional::wait_tensor"]


class Seen:
    """A handler that keeps what it is given and answers with Works that are complete."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.waits: list[Work] = []
        self.tensors: list[torch.Tensor] = []
        self.batches: list[str] = []

    def handle(self, call: Call, proceed: Proceed) -> Work | None:
        self.calls.append(call)
        if call.operator.returns is Returns.NOTHING:
            return None
        return completed_work(call.result, call.device)

    def on_wait(self, work: Work, wait: Callable[[], bool]) -> bool:
        self.waits.append(work)
        return wait()

    def on_wait_tensor(self, tensor: torch.Tensor, wait: Callable[[], torch.Tensor]) -> torch.Tensor:
        self.tensors.append(tensor)
        return wait()

    def start_batch(self, pg: ProcessGroup) -> None:
        self.batches.append("start")

    def end_batch(self, pg: ProcessGroup, proceed: Proceed) -> Work | None:
        self.batches.append("end")
        return proceed()


@pytest.fixture
def seen() -> Iterator[Seen]:
    """A handler in place, in a world of four in which this is rank 1."""
    handler = Seen()
    with fake_world(1, 4):
        interposer = install(handler)
        try:
            yield handler
        finally:
            interposer.remove()


def torch_methods() -> dict[str, Any]:
    """Identity of everything that a session may replace."""
    return {
        f"{owner.__name__}.{name}": value
        for owner in (Work, ProcessGroup)
        for name, value in vars(owner).items()
    }


def test_removing_leaves_torch_as_it_was() -> None:
    def state() -> tuple[dict[str, str], dict[str, Any]]:
        return {name: torch._C._dispatch_dump(name) for name in INTERPOSED}, torch_methods()

    kernels, methods = state()
    interposer = install(Seen())
    assert is_installed()
    assert all("BackendSelect" in torch._C._dispatch_dump(name) for name in INTERPOSED)
    assert torch_methods()["Work.wait"] is not methods["Work.wait"]
    interposer.remove()
    interposer.remove()
    assert not is_installed()
    after_kernels, after_methods = state()
    assert after_kernels == kernels
    assert after_methods.keys() == methods.keys()
    assert all(after_methods[name] is method for name, method in methods.items())


def test_second_session_is_refused_until_the_first_has_ended() -> None:
    interposer = install(Seen())
    with pytest.raises(UsageError, match="end that session before another begins"):
        install(Seen())
    interposer.remove()
    install(Seen()).remove()


def test_operator_that_is_not_in_the_table_is_an_error_that_names_it() -> None:
    library = Library("c10d", "FRAGMENT")
    library.define("frobnicate_(Tensor[] tensors) -> ()")
    try:
        with pytest.raises(UnknownOperatorError, match=r"c10d::frobnicate_\b") as caught:
            install(Seen())
        assert caught.value.exit_status == 6
        assert torch.__version__ in str(caught.value)
        assert not is_installed()
    finally:
        library._destroy()
    install(Seen()).remove()


def test_table_agrees_with_the_schemas_of_this_torch() -> None:
    schemas = {
        schema.name: schema for schema in torch._C._jit_get_all_schemas() if schema.name.startswith("c10d::")
    }
    # a check of one's own numbers is no communication
    assert {f"c10d::{operator.name}" for operator in operators()} == schemas.keys() - {"c10d::check_for_nan"}
    for operator in operators():
        names = [argument.name for argument in schemas[f"c10d::{operator.name}"].arguments]
        for argument in (operator.inputs, operator.outputs, operator.peer):
            assert argument in ("", *names), operator
        assert operator.in_place == (operator.inputs == operator.outputs != "")
        assert names[operator.at.process_group] == "process_group"
        assert operator.inputs == "" or names[operator.at.inputs] == operator.inputs


def test_left_out_arguments_have_their_defaults() -> None:
    operator = next(operator for operator in operators() if operator.name == "allreduce_")
    values = operator.values(("tensors", "group", "op", None))
    assert values[operator.at.async_op] is True
    assert values[operator.at.reduce_op] == "op"
    assert values[operator.at.peer] is None
    assert operator.values(("tensors", "group", "op", None, False))[operator.at.async_op] is False


def one(shape: int = 4) -> torch.Tensor:
    return torch.ones(shape)


CALLS: dict[str, tuple[Callable[[], object], dict[str, Any]]] = {
    "all_reduce": (
        lambda: dist.all_reduce(one(), dist.ReduceOp.MAX),
        {"reduce_op": "max", "is_async": False, "informative": True},
    ),
    "all_reduce async": (
        lambda: dist.all_reduce(one(), dist._make_nccl_premul_sum(2.0), async_op=True),
        {"reduce_op": "premul_sum", "is_async": True},
    ),
    "reduce": (lambda: dist.reduce(one(), 3), {"peer": 3, "reduce_op": "sum"}),
    "broadcast": (lambda: dist.broadcast(one(), 2), {"peer": 2, "informative": False}),
    "broadcast by its root": (lambda: dist.broadcast(one(), 1), {"peer": 1, "informative": True}),
    "all_gather": (lambda: dist.all_gather([one() for _ in range(4)], one()), {"outputs": 4, "inputs": 1}),
    "all_gather_into_tensor": (lambda: dist.all_gather_into_tensor(one(16), one()), {"outputs": 1}),
    "reduce_scatter": (lambda: dist.reduce_scatter(one(), [one() for _ in range(4)]), {"inputs": 4}),
    "reduce_scatter_tensor": (lambda: dist.reduce_scatter_tensor(one(), one(16)), {"inputs": 1}),
    "gather": (lambda: dist.gather(one(), None, 0), {"peer": 0, "outputs": 0, "informative": True}),
    "scatter": (lambda: dist.scatter(one(), None, 0), {"peer": 0, "inputs": 0, "informative": False}),
    "all_to_all": (
        lambda: dist.all_to_all([one() for _ in range(4)], [one() for _ in range(4)]),
        {"inputs": 4, "outputs": 4},
    ),
    "all_to_all_single": (
        lambda: dist.all_to_all_single(one(6), one(10), [0, 1, 2, 3], [4, 3, 2, 1]),
        {"out_split_sizes": (0, 1, 2, 3), "in_split_sizes": (4, 3, 2, 1)},
    ),
    "send": (lambda: dist.send(one(), 2, tag=5), {"peer": 2, "tag": 5, "inputs": 1, "outputs": 0}),
    "recv": (lambda: dist.irecv(one(), 3, tag=6), {"peer": 3, "tag": 6, "informative": False}),
    "barrier": (lambda: dist.barrier(async_op=True), {"is_async": True, "peer": NO_PEER, "inputs": 0}),
}


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("name", CALLS)
def test_call_is_decoded(name: str, seen: Seen) -> None:
    make, wanted = CALLS[name]
    make()
    assert len(seen.calls) == 1
    call = seen.calls[0]
    assert call.operator.op == name.split(" ")[0]
    for field, value in wanted.items():
        found = getattr(call, field)
        assert (len(found) if isinstance(found, list) else found) == value, field
    assert call.device == torch.device("cpu")
    assert call.pg.size() == 4


def test_functional_collective_passes_by_its_operator_and_its_wait(seen: Seen) -> None:
    result = funcol.all_reduce(one(), "sum", dist.group.WORLD)
    assert [call.operator.op for call in seen.calls] == ["all_reduce"]
    assert seen.tensors == []
    assert isinstance(result, funcol.AsyncCollectiveTensor)
    assert (result + 1).tolist() == [2.0] * 4
    assert [tensor.data_ptr() for tensor in seen.tensors] == [seen.calls[0].outputs[0].data_ptr()]
    # torch waited for the Work in C++
    assert seen.waits == []


def test_wait_of_the_program_is_seen_and_handle_outlives_python(seen: Seen) -> None:
    work = dist.all_reduce(one(), async_op=True)
    assert work is not None
    assert work.wait()
    assert seen.waits == [work]
    dist.all_reduce(one())
    # torch waits by itself for a synchronous call
    assert len(seen.waits) == 2


def test_meta_tensors_communicate_nothing(seen: Seen) -> None:
    dist.all_reduce(torch.ones(4, device="meta"))
    assert seen.calls == []


def test_coalescing_batch_is_told_to_the_handler() -> None:
    """With a backend that coalesces, ``batch_isend_irecv`` brackets its calls and returns the end's Work."""
    end = completed_work([], torch.device("cpu"))

    class Coalescing(Seen):
        def end_batch(self, pg: ProcessGroup, proceed: Proceed) -> Work | None:
            assert super().end_batch(pg, proceed) is None
            return end

    handler = Coalescing()
    with Patches() as patches, fake_world(1, 4):
        let_fake_groups_coalesce(patches, "nccl")
        interposer = install(handler)
        try:
            works = dist.batch_isend_irecv(
                [dist.P2POp(dist.isend, one(), 2), dist.P2POp(dist.irecv, one(), 0)]
            )
        finally:
            interposer.remove()
    assert handler.batches == ["start", "end"]
    assert [call.operator.op for call in handler.calls] == ["send", "recv"]
    assert len(works) == 1
    assert works[0] is end


class Rows:
    """Stands in for the trace's writer."""

    def __init__(self) -> None:
        self.calls: list[CallRow] = []
        self.completions: dict[int, CompletionRow] = {}
        self.waits: list[WaitRow] = []
        self.values: dict[bytes, bytes] = {}
        self.failure = ""

    def call(self, row: CallRow, *, is_new: bool = False) -> None:
        self.calls.append(row)

    def completion(self, row: CompletionRow) -> None:
        self.completions[row.entry] = row

    def wait(self, row: WaitRow) -> None:
        self.waits.append(row)

    def has(self, address: bytes) -> bool:
        return address in self.values

    def store(self, address: bytes, data: memoryview) -> None:
        self.values[address] = bytes(data)

    def fail(self, reason: str) -> None:
        self.failure = reason


class FakeGroup:
    """What the recorder asks of a process group; unlike the real one it can be watched ending."""

    group_name = "fake"

    def rank(self) -> int:
        return 1


class FakeCall:
    """What the recorder asks of a call."""

    def __init__(self, pg: FakeGroup, tensor: torch.Tensor) -> None:
        self.pg = pg
        self.operator = next(operator for operator in operators() if operator.name == "recv_")
        self.inputs: list[torch.Tensor] = []
        self.outputs = [tensor]
        self.informative = False
        self.is_async = True
        self.device = tensor.device


class FakeSignatures:
    def of(self, call: FakeCall) -> Any:
        class Known:
            id, lane, floating = 0, ("fake", "", 0), True

            class signature:
                purpose = "tensor"

        return Known


@pytest.fixture
def rows() -> Rows:
    return Rows()


@pytest.fixture
def recorder(rows: Rows) -> Recorder:
    clock = MonotonicClock()
    steps = Steps(clock, lambda: None, lambda _: None)
    return Recorder(rows, FakeSignatures(), steps, Values(True, None), clock)  # type: ignore[arg-type]


def test_calls_of_a_batch_end_with_the_batch(recorder: Recorder, rows: Rows) -> None:
    """As NCCL has it: single calls return Works that mean nothing, the end's Work counts for all."""
    pg = FakeGroup()
    first, second = torch.zeros(2), torch.zeros(3)
    meaningless = completed_work([], first.device)
    recorder.start_batch(pg)  # type: ignore[arg-type]
    for tensor in (first, second):
        work = recorder.handle(FakeCall(pg, tensor), lambda: meaningless)  # type: ignore[arg-type]
        assert work is meaningless
    future: torch.futures.Future[Any] = torch.futures.Future()
    batch = recorder.end_batch(pg, lambda: _create_work_from_future(future))  # type: ignore[arg-type]
    assert batch is not None
    assert not batch.is_completed()
    assert rows.completions == {}

    first.fill_(1)
    second.fill_(2)
    future.set_result(None)
    assert recorder.on_wait(batch, lambda: wait_for(batch))
    assert [row.batch for row in rows.calls] == [0, 0]
    assert sorted(rows.completions) == [0, 1]
    kept = [rows.values[rows.completions[entry].out_addresses[0]] for entry in (0, 1)]
    assert kept == [first.numpy().tobytes(), second.numpy().tobytes()]
    assert [wait.call for wait in rows.waits] == [1]

    # outside the batch again, and in a second one
    recorder.handle(FakeCall(pg, first), lambda: completed_work([], first.device))  # type: ignore[arg-type]
    recorder.start_batch(pg)  # type: ignore[arg-type]
    recorder.handle(FakeCall(pg, first), lambda: meaningless)  # type: ignore[arg-type]
    assert [row.batch for row in rows.calls] == [0, 0, -1, 1]


def test_failure_of_a_batch_is_each_calls_and_raised_by_its_wait(recorder: Recorder, rows: Rows) -> None:
    pg = FakeGroup()
    tensor = torch.zeros(1)
    recorder.start_batch(pg)  # type: ignore[arg-type]
    for _ in range(2):
        recorder.handle(FakeCall(pg, tensor), lambda: pending_work(tensor.device))  # type: ignore[arg-type]
    broken = ConnectionError("the peer is gone")
    batch = recorder.end_batch(pg, lambda: failed_work(broken, tensor.device))  # type: ignore[arg-type]
    assert batch is not None
    with pytest.raises(RuntimeError, match="the peer is gone"):
        recorder.on_wait(batch, lambda: wait_for(batch))
    assert [rows.completions[entry].error.partition(":")[0] for entry in (0, 1)] == ["RuntimeError"] * 2
    assert all("the peer is gone" in row.error for row in rows.completions.values())


def test_results_are_kept_by_the_step_a_call_was_issued_in(rows: Rows) -> None:
    """A window's last calls may end after it."""
    clock = MonotonicClock()
    steps = Steps(clock, lambda: None, lambda _: None)
    recorder = Recorder(rows, FakeSignatures(), steps, Values(True, (0, 1)), clock)  # type: ignore[arg-type]
    futures: list[torch.futures.Future[Any]] = [torch.futures.Future() for _ in range(2)]
    works = []
    for future in futures:
        call = FakeCall(FakeGroup(), torch.ones(2))
        works.append(recorder.handle(call, partial(_create_work_from_future, future)))  # type: ignore[arg-type]
        steps.end()
    for future in futures:
        future.set_result(None)
    assert [row.step for row in rows.calls] == [-1, 1]
    assert [len(rows.completions[entry].out_addresses) for entry in (0, 1)] == [1, 0]


def test_pending_call_does_not_keep_its_process_group(recorder: Recorder) -> None:
    """gloo frees what it ran in a thread of the group: a group that ended there would join itself."""
    pg = FakeGroup()
    gone = weakref.ref(pg)
    future: torch.futures.Future[Any] = torch.futures.Future()
    work = recorder.handle(FakeCall(pg, torch.zeros(1)), lambda: _create_work_from_future(future))  # type: ignore[arg-type]
    assert work is not None
    del pg
    gc.collect()
    assert gone() is None
    future.set_result(None)
    assert work.is_completed()


def test_failure_that_nobody_could_see_is_raised_by_the_next_call(recorder: Recorder, rows: Rows) -> None:
    pg = FakeGroup()
    tensor = torch.zeros(1)
    broken = ConnectionError("the peer is gone")
    recorder.handle(FakeCall(pg, tensor), lambda: failed_work(broken, tensor.device))  # type: ignore[arg-type]
    gc.collect()
    with pytest.raises(RuntimeError, match="the peer is gone"):
        recorder.handle(FakeCall(pg, tensor), lambda: pytest.fail("called through"))  # type: ignore[arg-type]
    assert "the peer is gone" in rows.completions[1].error
    # once
    recorder.handle(FakeCall(pg, tensor), lambda: completed_work([], tensor.device))  # type: ignore[arg-type]


def test_wait_with_a_limit() -> None:
    """torch has none for Works made from a future; its words for the end of patience are kept."""
    with pytest.raises(RuntimeError, match=r"^Operation timed out!$"):
        wait_for(pending_work(torch.device("cpu")), timedelta(milliseconds=1))
    assert wait_for(completed_work([], torch.device("cpu")), timedelta(minutes=1))
    future: torch.futures.Future[Any] = torch.futures.Future()
    work = _create_work_from_future(future)
    thread = threading.Thread(target=future.set_result, args=(None,))
    thread.start()
    assert wait_for(work, timedelta(minutes=1))
    thread.join()


def test_completed_work_in_every_way_of_looking_at_it() -> None:
    tensors = [torch.ones(2), torch.zeros(3)]
    work = completed_work(tensors, torch.device("cpu"))
    assert work.is_completed()
    assert work.wait()
    assert [a is b for a, b in zip(work.get_future().value(), tensors, strict=True)] == [True, True]
    assert not pending_work(torch.device("cpu")).is_completed()
    failed = failed_work(ValueError("no"), torch.device("cpu"))
    assert failed.is_completed()
    with pytest.raises(RuntimeError, match="no"):
        failed.get_future().wait()


def test_signatures_of_many_threads_have_each_their_number() -> None:
    """A signature is announced once, in the order of the numbers."""
    announced: list[Any] = []
    with fake_world(0, 2):
        groups = Groups(lambda _: None)
        signatures = Signatures(groups, Sites(), announced.append)
        handler = Seen()
        found: dict[tuple[int, ...], set[int]] = {}
        lock = threading.Lock()

        def handle(call: Call, proceed: Proceed) -> Work:
            interned = signatures.of(call)
            with lock:
                found.setdefault(tuple(call.inputs[0].shape), set()).add(interned.id)
                assert announced[interned.id] == interned.signature
            return completed_work(call.result, call.device)

        handler.handle = handle  # type: ignore[method-assign]
        interposer: Interposer = install(handler)
        try:
            barrier = threading.Barrier(4)

            def work() -> None:
                barrier.wait()
                for size in range(1, 30):
                    dist.all_reduce(torch.ones(size))

            threads = [threading.Thread(target=work) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            interposer.remove()
            groups.close()
    assert len(announced) == 29
    assert sorted(found) == [(size,) for size in range(1, 30)]
    assert all(len(ids) == 1 for ids in found.values())


def test_kinds_say_how_ranks_are_paired() -> None:
    kinds = {operator.op: operator.kind for operator in operators()}
    assert kinds["send"] is Kind.SEND
    assert kinds["recv"] is kinds["recv_any_source"] is Kind.RECV
    assert kinds["barrier"] is kinds["monitored_barrier"] is Kind.SYNC
    assert kinds["all_reduce"] is Kind.COLLECTIVE
