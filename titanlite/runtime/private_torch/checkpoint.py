"""Distributed checkpoints (DCP): their metadata, and the cache of plans."""

from typing import Any

from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlanner

StorageInfo = filesystem._StorageInfo
"""Place of a tensor in a checkpoint: file, offset and length in bytes."""

MemoryFormat = metadata._MEM_FORMAT_ENCODING
"""Memory format of a tensor, in a checkpoint's metadata."""


def set_plan_cache_key(planner: DefaultSavePlanner, key: str) -> None:
    """Give a planner its own entry in DCP's cache of plans, which belongs to the class."""
    planner._cached_plans_key = key


def has_cached_plan(key: str) -> bool:
    return key in SavePlanner._cached_save_plan


def forget_cached_plans(key: str) -> None:
    """Delete what a planner has left in DCP's cache of plans."""
    caches: list[dict[str, Any]] = [
        SavePlanner._cached_save_plan,
        SavePlanner._cached_final_save_plan,
        SavePlanner._cached_all_plans,
        SavePlanner._cached_global_plan,
        SavePlanner._cached_metadata,
    ]
    for cache in caches:
        cache.pop(key, None)
