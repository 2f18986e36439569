"""Process groups: timeouts, and calls whose result or failure all ranks share."""

from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist
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
    for group in distributed_c10d._world.pg_map:
        if group.group_desc != but_for:
            distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)
