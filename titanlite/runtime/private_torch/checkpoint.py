"""Distributed checkpoints (DCP): their metadata, and the cache of plans."""

import copyreg
import io
import pickle
from typing import Any

from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlanner

StorageInfo = filesystem._StorageInfo
"""Place of a tensor in a checkpoint: file, offset and length in bytes."""

MemoryFormat = metadata._MEM_FORMAT_ENCODING
"""Memory format of a tensor, in a checkpoint's metadata."""


OLDEST_FIELDS = 5
"""Fields of the properties of a tensor in DCP's metadata before torch 2.15, which adds strides. 2.15 reads both."""


class StoredProperties(metadata.TensorProperties):
    """Properties of a tensor as a checkpoint of any release of PyTorch has them. Strides are not read."""

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        super().__setstate__(state[:OLDEST_FIELDS])


def pickle_metadata(found: metadata.Metadata) -> bytes:
    """Return DCP's metadata in the form that plain DCP reads, of this release of PyTorch or an older one."""

    def oldest_form(properties: metadata.TensorProperties) -> tuple[Any, ...]:
        state: Any = properties.__getstate__()
        return metadata.TensorProperties, (), state[:OLDEST_FIELDS]

    pickler = pickle.Pickler(stream := io.BytesIO())
    pickler.dispatch_table = copyreg.dispatch_table | {metadata.TensorProperties: oldest_form}
    pickler.dump(found)
    return stream.getvalue()


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
