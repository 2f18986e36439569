"""Work that ranks do together: an error on one rank is raised on all of them."""

import socket
from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint import CheckpointException

from titanlite.runtime.errors import DamagedCheckpoint, RunError, UserError
from titanlite.runtime.private_torch.process_groups import run_on_all_ranks, run_on_rank_0

T = TypeVar("T")
S = TypeVar("S")


def on_rank_0(group: dist.ProcessGroup, act: Callable[[], T]) -> T:
    """Call a function on rank 0, and return its result on every rank.

    Raises:
        UserError, DamagedCheckpoint, RunError: the same on every rank, see `error_of_ranks`.
    """
    try:
        return run_on_rank_0(group, act)
    except CheckpointException as error:
        raise error_of_ranks(error) from None


def on_all(group: dist.ProcessGroup, act: Callable[[], T], then: Callable[[list[T]], S] = lambda _: None) -> S:
    """Call a function on every rank, and another on rank 0 with all results. Return its result on every rank.

    Raises:
        UserError, DamagedCheckpoint, RunError: the same on every rank, see `error_of_ranks`.
    """
    try:
        return run_on_all_ranks(group, act, then)
    except CheckpointException as error:
        raise error_of_ranks(error) from None


def error_of_ranks(error: CheckpointException) -> Exception:
    """Choose the error that every rank raises: a user's mistake, damage, or the failure of the lowest rank."""
    failures = {rank: failure[0] for rank, failure in sorted(error.failures.items())}
    for first in (UserError, DamagedCheckpoint):
        for failure in failures.values():
            if isinstance(failure, first):
                return failure
    rank, failure = next(iter(failures.items()))
    return RunError(f"rank {rank}: {failure}" if isinstance(failure, OSError) else f"rank {rank}: {failure!r}")


def host_names(group: dist.ProcessGroup) -> list[str]:
    """Return the name of each rank's host, in the order of ranks."""
    names: list[str] = [""] * group.size()
    dist.all_gather_object(names, socket.gethostname(), group=group)
    return names


def check_same_everywhere(value: str, what: str, *, group: dist.ProcessGroup) -> None:
    """Check that a value is the same on all ranks; files may differ from node to node.

    Raises:
        UserError: the value differs.
    """
    values: list[str] = [""] * group.size()
    dist.all_gather_object(values, value, group=group)
    if odd := [rank for rank, other in enumerate(values) if other != values[0]]:
        raise UserError(f"{what} of rank {odd[0]} is not that of rank 0 ({values[odd[0]]} and {values[0]})")
