"""What ranks do together: an error of one is the same error on all. The work is done by DCP's own wrapper."""

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.utils import _DistWrapper

from titanlite.runtime.errors import DamagedCheckpoint, RunError, UserError

T = TypeVar("T")
S = TypeVar("S")


def on_rank_0(group: dist.ProcessGroup, act: Callable[[], T]) -> T:
    """What rank 0 finds, on every rank."""
    return _told(lambda: _DistWrapper(group, True, 0).broadcast("", act))


def on_all(group: dist.ProcessGroup, act: Callable[[], T], then: Callable[[list[T]], S] = lambda _: None) -> S:
    """Do it on every rank, and then something on rank 0 with what each returned; what that returns, on every rank."""
    return _told(lambda: _DistWrapper(group, True, 0).all_reduce("", act, then))


def _told(act: Callable[[], T]) -> T:
    try:
        return act()
    except CheckpointException as error:
        raise cause(error) from None


def cause(error: CheckpointException) -> Exception:
    """Of what failed on some ranks, what all should know."""
    failures = {rank: failure[0] for rank, failure in sorted(error.failures.items())}
    for kind in (UserError, DamagedCheckpoint):
        for failure in failures.values():
            if isinstance(failure, kind):
                return failure
    rank, failure = next(iter(failures.items()))
    return RunError(f"rank {rank}: {failure}" if isinstance(failure, OSError) else f"rank {rank}: {failure!r}")


def check_same_everywhere(value: str, what: str, *, group: dist.ProcessGroup) -> None:
    """Raises:
    UserError: the value is not the same on all ranks (files that differ from node to node, say).
    """
    values: list[str] = [""] * group.size()
    dist.all_gather_object(values, value, group=group)
    if odd := [rank for rank, other in enumerate(values) if other != values[0]]:
        raise UserError(f"{what} of rank {odd[0]} is not that of rank 0 ({values[odd[0]]} and {values[0]})")
