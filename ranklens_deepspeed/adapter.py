"""What RankLens asks of DeepSpeed: where steps begin and end, and what each group is for."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.comm import torch as torch_backend
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.utils import groups
from torch._C._distributed_c10d import ProcessGroup

from ranklens_core.c10d.peers import Peers
from ranklens_core.patches import Patches
from ranklens_core.steps import Steps
from ranklens_deepspeed.uniform import UniformPeers

GLOBAL_ROLES = {
    "_WORLD_GROUP": "world",
    "_DATA_PARALLEL_GROUP": "dp",
    "_TENSOR_MODEL_PARALLEL_GROUP": "model",
    "_EXPERT_PARALLEL_GROUP": "expert",
    "_EXPERT_DATA_PARALLEL_GROUP": "expert_data",
    "_ZERO_PARAM_INTRA_PARALLEL_GROUP": "hpz",
    "_ALL_TO_ALL_GROUP": "all_to_all",
}
"""Globals of ``deepspeed.utils.groups`` (a group, or groups by name) and their roles. ``_WORLD_GROUP`` is
DeepSpeed's own copy of the world, which is ``dp`` too where nothing but data is parallel."""

ENGINE_ROLES = {"data_parallel_group": "dp", "seq_parallel_group": "sequence"}
"""Attributes of an engine and their roles."""

GRID_ROLES = {
    "dp_proc_group": "dp",
    "pp_proc_group": "pipe",
    "slice_proc_group": "model",
    "ds_model_proc_group": "pipe_model",
}
"""Attributes of a pipeline engine's grid and their roles."""


class Adapter:
    """Patches DeepSpeed while it lives; see ``ranklens_core.adapters.Adapter``."""

    framework = "deepspeed"

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self._patches = Patches()
        self._engines: weakref.WeakSet[DeepSpeedEngine] = weakref.WeakSet()
        self._patches.set(DeepSpeedEngine, "__init__", self._created(DeepSpeedEngine.__init__))
        self._patches.set(DeepSpeedEngine, "forward", self._begins(DeepSpeedEngine.forward))
        self._patches.set(DeepSpeedEngine, "step", self._ends(DeepSpeedEngine.step))
        self._patches.set(PipelineEngine, "train_batch", self._whole_step(PipelineEngine.train_batch))

    def roles(self) -> Mapping[ProcessGroup, str]:
        """Roles of the groups that exist; one group may have several, joined by ``+``."""
        found: dict[ProcessGroup, list[str]] = {}
        for pg, role in self._pairs():
            roles = found.setdefault(pg, [])
            if role not in roles:
                roles.append(role)
        return {pg: "+".join(roles) for pg, roles in found.items()}

    def believe_peers(self, peers: Peers) -> None:
        """See ``uniform.py``. And nobody is there to share memory with, for which DeepSpeed would compile an
        extension first."""
        UniformPeers(peers, self._patches)
        self._patches.set(torch_backend, "build_shm_op", lambda: None)

    def remove(self) -> None:
        """Leave DeepSpeed as it was. Idempotent."""
        self._patches.undo()

    def _pairs(self) -> Iterator[tuple[ProcessGroup, str]]:
        if dist.is_initialized() and dist.group.WORLD is not None:
            yield dist.group.WORLD, "world"
        yield from _groups_of(groups, GLOBAL_ROLES)
        for engine in self._engines:
            yield from _groups_of(engine, ENGINE_ROLES)
            yield from _groups_of(getattr(engine, "grid", None), GRID_ROLES)
            # with sequence parallelism ZeRO shards over both dimensions, otherwise this is the dp group again
            across = getattr(engine, "seq_data_parallel_group", None)
            if across is not getattr(engine, "data_parallel_group", None) and isinstance(
                across, ProcessGroup
            ):
                yield across, "sequence_data"

    def _created(self, init: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(init)
        def patched(engine: DeepSpeedEngine, *args: Any, **kwargs: Any) -> None:
            # before the engine's optimizer makes its first, empty step
            self._steps.claim()
            init(engine, *args, **kwargs)
            self._engines.add(engine)

        return patched

    def _begins(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(forward)
        def patched(engine: DeepSpeedEngine, *args: Any, **kwargs: Any) -> Any:
            # an evaluation before the training is no step
            if engine.training and torch.is_grad_enabled():
                self._steps.begin()
            return forward(engine, *args, **kwargs)

        return patched

    def _ends(self, step: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(step)
        def patched(engine: DeepSpeedEngine, *args: Any, **kwargs: Any) -> Any:
            # whether this micro-batch ends the accumulation is decided inside, in several ways
            before = engine.global_steps
            result = step(engine, *args, **kwargs)
            if engine.global_steps != before:
                self._steps.end()
            return result

        return patched

    def _whole_step(self, train_batch: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(train_batch)
        def patched(*args: Any, **kwargs: Any) -> Any:
            self._steps.begin()
            result = train_batch(*args, **kwargs)
            self._steps.end()
            return result

        return patched


def _groups_of(owner: object, roles: Mapping[str, str]) -> Iterator[tuple[ProcessGroup, str]]:
    """(group, role) for each attribute of ``owner`` that holds a group, or groups by name."""
    for name, role in roles.items():
        value = getattr(owner, name, None)
        for pg in value.values() if isinstance(value, dict) else [value]:
            if isinstance(pg, ProcessGroup):
                yield pg, role
