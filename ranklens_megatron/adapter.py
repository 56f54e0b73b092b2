"""What RankLens asks of Megatron: where steps begin and end, and what each group is for."""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing import validation
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.pipeline_parallel import p2p_communication, schedules
from torch._C._distributed_c10d import ProcessGroup

from ranklens_core import cpu_cuda
from ranklens_core.c10d.peers import Peers
from ranklens_core.import_hook import ImportHook
from ranklens_core.patches import Patches
from ranklens_core.steps import Steps

SCHEDULES = (
    "forward_backward_no_pipelining",
    "forward_backward_pipelining_with_interleaving",
    "forward_backward_pipelining_without_interleaving",
)
"""Functions of ``schedules`` that run a step's micro-batches; ``get_forward_backward_func`` gives one."""

ROLES = {
    "_TENSOR_MODEL_PARALLEL_GROUP": "tp",
    "_PIPELINE_MODEL_PARALLEL_GROUP": "pp",
    "_DATA_PARALLEL_GROUP": "dp",
    "_DATA_PARALLEL_GROUP_WITH_CP": "dp_cp",
    "_DATA_PARALLEL_GROUP_WITH_CP_AG": "dp_cp_ag",
    "_CONTEXT_PARALLEL_GROUP": "cp",
    "_HIERARCHICAL_CONTEXT_PARALLEL_GROUPS": "hcp",
    "_HYBRID_DP_CP_GROUPS": "hybrid_dp_cp",
    "_EXPERT_MODEL_PARALLEL_GROUP": "ep",
    "_EXPERT_TENSOR_PARALLEL_GROUP": "etp",
    "_EXPERT_DATA_PARALLEL_GROUP": "edp",
    "_MODEL_PARALLEL_GROUP": "mp",
    "_TENSOR_AND_DATA_PARALLEL_GROUP": "tp_dp",
    "_TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP": "tp_dp_cp",
    "_TENSOR_AND_CONTEXT_PARALLEL_GROUP": "tp_cp",
    "_EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP": "etp_ep",
    "_EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP": "etp_ep_pp",
    "_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP": "intra_dp_cp",
    "_INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP": "intra_edp",
    "_INTER_PARTIAL_EXPERT_DATA_PARALLEL_GROUP": "inter_edp",
    "_INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP": "optimizer_instance",
}
"""Globals of ``parallel_state`` (a group, a list of groups, or groups by size) and the field's short
names of their roles; ``role_named`` names the others."""

KERNELS = "megatron.legacy.fused_kernels"
"""Megatron-LM's module whose ``load(args)`` asks nvcc for its version before training starts."""


class Adapter:
    """Patches Megatron while it lives; see ``ranklens_core.adapters.Adapter``."""

    framework = "megatron"

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self._patches = Patches()
        self._depth = 0
        for name in SCHEDULES:
            if hasattr(schedules, name):
                self._patches.set(schedules, name, self._begins(getattr(schedules, name)))
        for cls in _with_subclasses(MegatronOptimizer):
            self._watch(cls)
        self._patches.set(MegatronOptimizer, "__init_subclass__", classmethod(self._subclassed))
        if cpu_cuda.is_installed():
            self._patches.on_undo(ImportHook({KERNELS: self._load_no_kernels}).remove)

    def roles(self) -> Mapping[ProcessGroup, str]:
        """Roles of the groups that exist; one group may have several, joined by ``+``."""
        found: dict[ProcessGroup, str] = {}
        if dist.is_initialized() and dist.group.WORLD is not None:
            found[dist.group.WORLD] = "world"
        for name, value in vars(parallel_state).items():
            for pg in _members(value):
                if isinstance(pg, ProcessGroup):
                    role = role_named(name)
                    found[pg] = f"{found[pg]}+{role}" if pg in found else role
        return found

    def believe_peers(self, peers: Peers) -> None:
        """With variable sequence lengths stages tell each other shapes: that of the micro-batch. And which
        shards of a checkpoint they hold: those are not this rank's, and cannot be checked against them."""
        self._patches.set(validation, "validate_sharding_integrity", lambda *_: None)
        communicator = getattr(p2p_communication, "P2PCommunicator", None)
        if communicator is not None:
            wrapped = _telling_shapes(communicator._communicate, peers)
            self._patches.set(communicator, "_communicate", wrapped)

    def remove(self) -> None:
        """Leave Megatron as it was. Idempotent."""
        self._patches.undo()

    def _load_no_kernels(self) -> None:
        """Where the CPU stands in for CUDA there is no nvcc, and Megatron's own Python code runs instead."""
        self._patches.set(sys.modules[KERNELS], "load", lambda args: None)

    def _begins(self, schedule: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(schedule)
        def patched(*args: Any, **kwargs: Any) -> Any:
            # an evaluation before the training is no step
            if not kwargs.get("forward_only", False):
                self._steps.begin()
            return schedule(*args, **kwargs)

        return patched

    def _subclassed(self, cls: type[Any], /, **kwargs: Any) -> None:
        """``__init_subclass__`` of Megatron's optimizers: models and programs define more of them later."""
        super(MegatronOptimizer, cls).__init_subclass__(**kwargs)
        self._watch(cls)

    def _watch(self, cls: type) -> None:
        if "step" in vars(cls):
            self._patches.set(cls, "step", self._ends(vars(cls)["step"]))

    def _ends(self, step: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(step)
        def patched(*args: Any, **kwargs: Any) -> Any:
            # claimed here and not by the schedule, which serves other optimizers too
            self._steps.claim()
            # a chained optimizer steps others: the outermost one is the training's
            self._depth += 1
            try:
                result = step(*args, **kwargs)
            finally:
                self._depth -= 1
            if self._depth == 0:
                self._steps.end()
            return result

        return patched


def _telling_shapes(communicate: Callable[..., Any], peers: Peers) -> Callable[..., Any]:
    @functools.wraps(communicate)
    def patched(*args: Any, **kwargs: Any) -> Any:
        shape = kwargs.get("tensor_shape")
        with peers.sending(torch.tensor(shape)) if shape else nullcontext():
            return communicate(*args, **kwargs)

    return patched


def role_named(name: str) -> str:
    """The role of the group that ``parallel_state`` calls ``name``: ``ROLES``, a gloo twin of one of
    them (``dp_gloo``), or for a group this table does not know, its name in short (``gtp_weight_remat``)."""
    base = name.removesuffix("_GLOO")
    role = ROLES.get(base) or re.sub(r"_GROUPS?$", "", base).strip("_").lower()
    return role if base == name else f"{role}_gloo"


def _members(value: object) -> Iterable[object]:
    """``value`` as the groups it may be: several in a list or a dict, or one."""
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else [value]


def _with_subclasses(cls: type[Any]) -> list[type[Any]]:
    """``cls`` and all its subclasses, each once, bases first."""
    found = [cls]
    for known in found:
        subclasses: list[type[Any]] = known.__subclasses__()
        found.extend(sub for sub in subclasses if sub not in found)
    return found
