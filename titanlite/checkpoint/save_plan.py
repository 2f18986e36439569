"""DCP's planner with plans that are made once: names, shapes and places are the same at each save."""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.planner import SavePlan

from titanlite.checkpoint.state import flat
from titanlite.runtime.private_torch.checkpoint import forget_cached_plans, has_cached_plan, set_plan_cache_key

Shapes = dict[str, tuple[torch.Size, torch.dtype]]


class CachingPlanner(DefaultSavePlanner):
    """Planner that plans again only when a name, shape or dtype has changed.

    DCP's own cache still makes a new plan at each save, to compare. This planner compares shapes instead.

    Args:
        key: entry in DCP's cache of plans.
    """

    def __init__(self, key: str) -> None:
        super().__init__(enable_plan_caching=True)
        self.key = key
        set_plan_cache_key(self, key)
        self._shapes: Shapes = {}
        self._is_unchanged = False
        self._planned: set[str] | None = None
        """Names that this rank writes, once they are planned."""

    def written_here(self, tensors: dict[str, Tensor]) -> set[str]:
        """Return the names that this rank writes; all of them before they are planned."""
        return self._planned if self._planned is not None and _shapes(tensors) == self._shapes else {*tensors}

    def set_up_planner(
        self, state_dict: Any, storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        shapes = _shapes(flat(state_dict))
        self._is_unchanged = shapes == self._shapes and has_cached_plan(self.key)
        self._shapes = shapes
        if not self._is_unchanged:
            super().set_up_planner(state_dict, storage_meta, is_coordinator)

    def create_local_plan(self) -> SavePlan:
        return SavePlan([], usable=False) if self._is_unchanged else super().create_local_plan()

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        plan = super().finish_plan(new_plan)
        self._planned = {item.index.fqn for item in plan.items}
        return plan

    def forget(self) -> None:
        """Delete the cached plans."""
        forget_cached_plans(self.key)


def _shapes(tensors: dict[str, Tensor]) -> Shapes:
    return {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
