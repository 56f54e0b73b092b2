"""Training steps as the program makes them, told by an adapter or by the optimizer.

A step begins with the first forward after the previous step's end and ends when its optimizer step
does. Calls before the first step are set-up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook

from ranklens_core.clock import Clock
from ranklens_core.schema import NO_STEP, Phase, Step


class Steps:
    """The step the program is in. ``on_begin`` is told once that set-up is over, ``on_end`` of every
    finished step. ``first`` is the number of the first: a program that goes on from a checkpoint has made the
    steps before it in another life."""

    def __init__(
        self, clock: Clock, on_begin: Callable[[], None], on_end: Callable[[Step], None], first: int = 0
    ) -> None:
        self._clock = clock
        self._on_begin = on_begin
        self._on_end = on_end
        self._first = first
        self._begin_ns = 0
        self.claimed = False
        self.index = NO_STEP
        self.phase = Phase.SETUP
        self.done: list[Step] = []

    def claim(self) -> None:
        """An adapter knows the program's steps: the optimizer's own are no longer counted."""
        self.claimed = True

    def begin(self) -> None:
        """The first step begins, if none has. Later ones begin where the previous ended."""
        if self.phase is Phase.SETUP:
            self.phase = Phase.STEP
            self.index = self._first
            self._begin_ns = self._clock.now_ns()
            self._on_begin()

    def end(self) -> None:
        """The current step's optimizer step is over."""
        self.begin()
        now_ns = self._clock.now_ns()
        step = Step(index=self.index, begin_ns=self._begin_ns, end_ns=now_ns)
        self.done.append(step)
        self.index += 1
        self._begin_ns = now_ns
        self._on_end(step)


class OptimizerSteps:
    """Steps of a program without adapter: first forward of a training module, optimizer steps."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self._hooks = [
            register_module_forward_pre_hook(self._forward),
            register_optimizer_step_post_hook(self._optimizer_step),
        ]

    def _forward(self, module: torch.nn.Module, _: Any) -> None:
        if module.training and torch.is_grad_enabled():
            self._steps.begin()
            # every module of every forward would pass here: one is enough
            self._hooks.pop(0).remove()

    def _optimizer_step(self, *_: Any) -> None:
        # an optimizer step before any forward prepares state (DeepSpeed does); it trains nothing
        if not self._steps.claimed and self._steps.phase is Phase.STEP:
            self._steps.end()

    def remove(self) -> None:
        """Take the hooks out. Idempotent."""
        while self._hooks:
            self._hooks.pop().remove()
