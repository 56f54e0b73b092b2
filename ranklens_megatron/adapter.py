"""What RankLens asks of Megatron: where steps begin and end, and what each group is for."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from megatron.core import parallel_state
from megatron.core.optimizer import optimizer as optimizers
from megatron.core.pipeline_parallel import schedules
from torch._C._distributed_c10d import ProcessGroup

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
    "_CONTEXT_PARALLEL_GROUP": "cp",
    "_HIERARCHICAL_CONTEXT_PARALLEL_GROUPS": "hcp",
    "_EXPERT_MODEL_PARALLEL_GROUP": "ep",
    "_EXPERT_TENSOR_PARALLEL_GROUP": "etp",
    "_EXPERT_DATA_PARALLEL_GROUP": "edp",
    "_MODEL_PARALLEL_GROUP": "mp",
    "_EMBEDDING_GROUP": "embedding",
    "_POSITION_EMBEDDING_GROUP": "position_embedding",
    "_TENSOR_AND_DATA_PARALLEL_GROUP": "tp_dp",
    "_TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP": "tp_dp_cp",
    "_TENSOR_AND_CONTEXT_PARALLEL_GROUP": "tp_cp",
    "_EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP": "etp_ep",
    "_EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP": "etp_ep_pp",
    "_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP": "intra_dp_cp",
    "_INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP": "intra_edp",
    "_INTER_PARTIAL_EXPERT_DATA_PARALLEL_GROUP": "inter_edp",
    "_INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP": "optimizer_instance",
    "_DATA_PARALLEL_GROUP_GLOO": "dp_gloo",
    "_DATA_PARALLEL_GROUP_WITH_CP_GLOO": "dp_cp_gloo",
    "_EXPERT_DATA_PARALLEL_GROUP_GLOO": "edp_gloo",
}
"""Globals of ``parallel_state`` (a group or a list of groups) and their roles. A version that lacks
one is fine: its groups have no role then."""


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
        for cls in _classes_with_step(optimizers.MegatronOptimizer):
            self._patches.set(cls, "step", self._ends(cls.__dict__["step"]))

    def roles(self) -> Mapping[ProcessGroup, str]:
        """Roles of the groups that exist; one group may have several, joined by ``+``."""
        found: dict[ProcessGroup, str] = {}
        for name, role in ROLES.items():
            value = getattr(parallel_state, name, None)
            for pg in value if isinstance(value, list) else [value]:
                if isinstance(pg, ProcessGroup):
                    found[pg] = f"{found[pg]}+{role}" if pg in found else role
        return found

    def remove(self) -> None:
        """Leave Megatron as it was. Idempotent."""
        self._patches.undo()

    def _begins(self, schedule: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(schedule)
        def patched(*args: Any, **kwargs: Any) -> Any:
            # an evaluation before the training is no step
            if not kwargs.get("forward_only", False):
                self._steps.claim()
                self._steps.begin()
            return schedule(*args, **kwargs)

        return patched

    def _ends(self, step: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(step)
        def patched(*args: Any, **kwargs: Any) -> Any:
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


def _classes_with_step(cls: type) -> list[type]:
    """``cls`` and its subclasses that define ``step`` themselves."""
    found = [cls] if "step" in cls.__dict__ else []
    subclasses: list[type] = cls.__subclasses__()
    for subclass in subclasses:
        found.extend(other for other in _classes_with_step(subclass) if other not in found)
    return found
