"""What ranks do together: an error of one is the same error on all. The work is done by DCP's own wrapper."""

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.utils import _DistWrapper

from titanlite.checkpoint.storage import DamagedCheckpoint
from titanlite.errors import RunError, UserError

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
