"""Process groups: timeouts, counts of collectives, and calls whose result or failure all ranks share."""

from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist
from torch._C._distributed_c10d import _dump_fr_trace_json  # pyright: ignore[reportAttributeAccessIssue]
from torch.distributed import distributed_c10d
from torch.distributed.checkpoint.utils import _DistWrapper

T = TypeVar("T")
S = TypeVar("S")


def run_on_rank_0(group: dist.ProcessGroup, act: Callable[[], T]) -> T:
    """Return the result of rank 0 on every rank.

    Raises:
        CheckpointException: on every rank, if rank 0 fails.
    """
    return _DistWrapper(group, True, 0).broadcast("", act)


def run_on_all_ranks(group: dist.ProcessGroup, act: Callable[[], T], then: Callable[[list[T]], S]) -> S:
    """Call `act` on every rank, and `then` on rank 0 with all results. Return the result of `then` on every rank.

    Raises:
        CheckpointException: on every rank, if any rank fails.
    """
    return _DistWrapper(group, True, 0).all_reduce("", act, then)


def set_timeouts(seconds: float, *, but_for: str) -> None:
    """Set the timeout of collectives that start from now on, in every process group of this process.

    Args:
        but_for: description (`group_desc`) of groups that keep theirs.
    """
    # public since torch 2.14, where the private name warns
    set_timeout = getattr(dist, "set_timeout", None) or distributed_c10d._set_pg_timeout
    for group in distributed_c10d._world.pg_map:
        if group.group_desc != but_for:
            set_timeout(timedelta(seconds=seconds), group)


def count_collectives() -> dict[str, int]:
    """Return the collectives that this process has started, by name and description of the process group.

    Another thread than training's may call it. The numbers are those by which PyTorch's flight recorder names
    collectives; groups of one rank are left out.
    """
    counts = {}
    for group in [*distributed_c10d._world.pg_map]:
        with suppress(RuntimeError):  # a backend that does not count, or a group that is being destroyed
            if group.size() > 1:
                backends = {id(it): it for it in (group._get_backend(device) for device in group._device_types)}
                counts[f"{group.group_name} ({group.group_desc})"] = sum(
                    backend._get_sequence_number_for_group()  # pyright: ignore[reportAttributeAccessIssue]
                    for backend in backends.values()
                )
    return counts


def connect_to_store() -> dist.Store:
    """Return the store of the process group by a new connection: its calls do not wait for those of other threads."""
    return distributed_c10d._get_default_store().clone()  # pyright: ignore[reportAttributeAccessIssue]


def recent_collectives() -> bytes:
    """Return the flight recorder's latest collectives of this process, as JSON."""
    return _dump_fr_trace_json()
