"""The teacher in a plan: which model it is, what a cache holds of it, and what another layout keeps of it."""

from dataclasses import replace
from typing import NamedTuple

from titanlite.checks.preflight import select_model
from titanlite.config.load import load
from titanlite.data.teacher_entries import TOP_K, StoredDtype, read_settings
from titanlite.models.decoder import DecoderArgs
from titanlite.models.registry import ModelSpec
from titanlite.schema import Teacher
from titanlite.techniques.distill.cache import cache_folder
from titanlite.tools.convert.source import open_teacher
from titanlite.tools.plan.memory import Profile
from titanlite.tools.plan.time import Unit
from titanlite.tools.plan.workload import Workload

PREFIX = "teacher."
"""Prefix of the teacher's FSDP units."""


class CacheEntry(NamedTuple):
    """What a cache holds of a teacher for each token."""

    top_k: int
    dtype: StoredDtype


def cache_entry(config: Teacher, *, vocab_size: int) -> CacheEntry | None:
    """Return what the cache of a config holds; None without one. One that is not written yet has the defaults.

    Raises:
        UserError: the folder is no cache.
    """
    if config.cache is None:
        return None
    folder = cache_folder(config.cache)
    if not folder.exists():
        return CacheEntry(min(TOP_K, vocab_size), "float16")
    settings = read_settings(folder)
    return CacheEntry(settings.top_k, settings.dtype)


def teacher_spec(config: Teacher, *, seq_len: int) -> ModelSpec | None:
    """Return the model of the teacher that runs; None without one. Weights need not be there if `teacher.config` is.

    Raises:
        UserError: there are no such weights, or they do not describe their model.
    """
    if config.path is None or not config.is_live:
        return None
    if config.config is not None:
        spec = select_model(load(config.config).model, None)
    else:
        spec = open_teacher(config.path, None).spec
    return spec._replace(args=replace(spec.args, max_seq_len=seq_len)) if isinstance(spec.args, DecoderArgs) else spec


def is_teacher(unit: Unit) -> bool:
    """Return whether an FSDP unit is one of the teacher."""
    return unit.name.startswith(PREFIX)


def kept_bytes(profile: Profile, workload: Workload, reshard: str | None, *, shard: int, world: int) -> float:
    """Return the bytes that another layout keeps of the teacher, beyond those of full sharding.

    Args:
        profile: of full sharding over `world` ranks; the teacher frees what it gathers.
        reshard: `teacher.fsdp_reshard_after_forward` of the other layout.
        shard: its shard degree.
    """
    more = profile.most("teacher") * (world / shard - 1)
    if reshard != "never" or shard == 1:
        return more
    return more + sum(max((it.bytes for it in unit.gather), default=0) for unit in workload.units if is_teacher(unit))
