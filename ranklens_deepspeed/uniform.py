"""What only DeepSpeed knows of the tensors that peers would send, for runs without a recording.

ZeRO-3 compares lists of numbers with rank 0's: uniform peers have this rank's. A pipeline stage is told
the shapes of its inputs: they follow from the layers before it and from a micro-batch.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from deepspeed.runtime.pipe import engine as pipe_engine
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.pipe.module import LayerSpec, PipelineModule
from deepspeed.runtime.zero import utils as zero_utils
from torch._subclasses.fake_tensor import FakeTensorMode

from ranklens_core.c10d.peers import Peers
from ranklens_core.patches import Patches

log = logging.getLogger("ranklens")


class UniformPeers:
    """Tells ``peers`` what DeepSpeed is about to receive, until ``patches`` are undone."""

    def __init__(self, peers: Peers, patches: Patches) -> None:
        self._peers = peers
        self._batches: weakref.WeakKeyDictionary[PipelineEngine, Batches] = weakref.WeakKeyDictionary()
        for name, values in (
            ("assert_lst_len_same_as_other_ranks", lambda numbers: torch.tensor(len(numbers))),
            ("get_lst_from_rank0", torch.tensor),
        ):
            patches.set(zero_utils, name, self._same_on_rank_0(getattr(zero_utils, name), values))
        patches.set(
            PipelineEngine, "set_dataiterator", self._keeping_iterator(PipelineEngine.set_dataiterator)
        )
        patches.set(PipelineEngine, "set_dataloader", self._keeping_loader(PipelineEngine.set_dataloader))
        patches.set(
            PipelineEngine, "_recv_tensor_meta", self._knowing_shapes(PipelineEngine._recv_tensor_meta)
        )

    def _same_on_rank_0(
        self, compare: Callable[[list[int]], Any], values: Callable[[list[int]], torch.Tensor]
    ) -> Callable[[list[int]], Any]:
        @functools.wraps(compare)
        def patched(numbers: list[int]) -> Any:
            with self._peers.sending(values(numbers)):
                return compare(numbers)

        return patched

    def _keeping_iterator(self, set_iterator: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(set_iterator)
        def patched(engine: PipelineEngine, iterator: Iterator[Any]) -> None:
            batches = self._batches[engine] = Batches(iterator)
            set_iterator(engine, batches)

        return patched

    def _keeping_loader(self, set_loader: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(set_loader)
        def patched(engine: PipelineEngine, loader: Any) -> None:
            self._batches[engine] = Batches(iter(loader))
            set_loader(engine, loader)

        return patched

    def _knowing_shapes(self, receive: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(receive)
        def patched(engine: PipelineEngine, send_stage: int) -> Any:
            message = self._message(engine, send_stage)
            if message is None:
                return receive(engine, send_stage)
            with self._peers.sending(message):
                return receive(engine, send_stage)

        return patched

    def _message(self, engine: PipelineEngine, send_stage: int) -> torch.Tensor | None:
        """What stage ``send_stage`` would announce; None, with a word in the log, if that fails."""
        batches = self._batches.get(engine)
        try:
            if batches is None:
                raise LookupError("this rank was given no data")
            batch = batches.peek()
            inputs = (engine.batch_fn(batch) if engine.batch_fn else batch)[0]
            return announced(engine, outputs_before(engine.module, inputs))
        except Exception as error:
            # the layers are the user's, and run here where they never do: then nobody knows the shapes, and
            # the receive is refused with a message of its own
            log.warning(
                "what the stages before this one send cannot be computed: %s: %s", type(error).__name__, error
            )
            return None


class Batches:
    """An iterator whose next item can be looked at."""

    def __init__(self, iterator: Iterator[Any]) -> None:
        self._iterator = iterator
        self._peeked: list[Any] = []

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> Any:
        return self._peeked.pop() if self._peeked else next(self._iterator)

    def peek(self) -> Any:
        """The next item, which stays the next. Raises ``StopIteration`` if there is none."""
        if not self._peeked:
            self._peeked.append(next(self._iterator))
        return self._peeked[0]


def outputs_before(module: PipelineModule, inputs: Any) -> Any:
    """The output of the layers before this stage's own for a micro-batch's ``inputs`` (a tensor or several):
    fake tensors, which have shapes and no values, so that nothing is computed and no memory is used."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad():
        if isinstance(inputs, torch.Tensor):
            passed: Any = mode.from_tensor(inputs)
        else:
            passed = tuple(mode.from_tensor(tensor) for tensor in inputs)
        tied: dict[str, Any] = {}
        for spec in module._layer_specs[: module._local_start]:
            passed = _layer(spec, tied)(passed)
    return passed


def _layer(spec: Any, tied: dict[str, Any]) -> Callable[[Any], Any]:
    """As ``PipelineModule._build`` makes it."""
    if not isinstance(spec, LayerSpec):
        callable_spec: Callable[[Any], Any] = spec
        return callable_spec
    key = getattr(spec, "key", None)
    layer = spec.build() if key is None else tied.setdefault(key, tied.get(key) or spec.build())
    forward = getattr(spec, "forward_fn", None)
    return layer if forward is None else functools.partial(forward, layer)


def announced(engine: PipelineEngine, outputs: torch.Tensor | Sequence[torch.Tensor]) -> torch.Tensor:
    """The message about ``outputs`` that DeepSpeed itself would send to the next stage."""
    sent: list[torch.Tensor] = []
    with Patches() as patches:
        patches.set(pipe_engine, "p2p", SimpleNamespace(send=lambda tensor, stage: sent.append(tensor)))
        engine._send_tensor_meta(outputs, engine.stage_id)
    return sent[0]
