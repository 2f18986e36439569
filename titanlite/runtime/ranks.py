"""What ranks do together: an error on one is raised on all of them, and all stop after the same step."""

import contextlib
import os
import socket
import warnings
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException

from titanlite.runtime.errors import DamagedCheckpoint, RunError, UserError
from titanlite.runtime.private_torch.process_groups import run_on_all_ranks, run_on_rank_0
from titanlite.runtime.signals import StopRequests

T = TypeVar("T")
S = TypeVar("S")


@contextlib.contextmanager
def calling_dcp(group: dist.ProcessGroup | None) -> Generator[None]:
    """Raise a failure in a call of DCP as `error_of_ranks`. Without a group, hide DCP's warning that there is none."""
    with warnings.catch_warnings() if group is None else contextlib.nullcontext():  # filters belong to all threads
        if group is None:
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            yield
        except CheckpointException as error:
            raise error_of_ranks(error) from None


def on_rank_0(group: dist.ProcessGroup, act: Callable[[], T]) -> T:
    """Call a function on rank 0, and return its result on every rank.

    Raises:
        UserError, DamagedCheckpoint, RunError: the same on every rank, see `error_of_ranks`.
    """
    with calling_dcp(group):
        return run_on_rank_0(group, act)


def on_all(group: dist.ProcessGroup, act: Callable[[], T], then: Callable[[list[T]], S] = lambda _: None) -> S:
    """Call a function on every rank, and another on rank 0 with all results. Return its result on every rank.

    Raises:
        UserError, DamagedCheckpoint, RunError: the same on every rank, see `error_of_ranks`.
    """
    with calling_dcp(group):
        return run_on_all_ranks(group, act, then)


def on_each(group: dist.ProcessGroup, act: Callable[[], T]) -> T:
    """Call a function on every rank, and return its own result on each. Raises as `on_all`."""
    results: list[T] = []
    on_all(group, lambda: results.append(act()))
    return results[0]


def error_of_ranks(error: CheckpointException) -> Exception:
    """Choose the error that every rank raises: a user's mistake, damage, or the failure of the lowest rank."""
    failures = {rank: failure[0] for rank, failure in sorted(error.failures.items())}
    for first in (UserError, DamagedCheckpoint):
        for failure in failures.values():
            if isinstance(failure, first):
                return failure
    rank, failure = next(iter(failures.items()))
    return RunError(
        f"rank {rank}: {failure}" if isinstance(failure, OSError | RunError) else f"rank {rank}: {failure!r}"
    )


def gather(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Return the value of every rank, in the order of ranks."""
    values: list[T] = [value] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def host_names(group: dist.ProcessGroup) -> list[str]:
    """Return the name of each rank's host, in the order of ranks. Hosts of one name get their number, too."""
    found = gather((socket.gethostname(), os.environ.get("GROUP_RANK", "0")), group)
    return [
        f"{name} (node {node})" if len({other for other in found if other[0] == name}) > 1 else name
        for name, node in found
    ]


def reduce_over_ranks(
    of_tokens: Sequence[Tensor],
    of_parameters: Tensor,
    counters: Sequence[Tensor],
    *,
    duplicates: int,
    world: dist.ProcessGroup,
) -> tuple[Tensor, Tensor]:
    """Sum values over all ranks in one all-reduce, so that the ranks agree on them to the last bit.

    Args:
        of_tokens: scalars, sums over this rank's tokens.
        of_parameters: scalar, sum over this rank's share of the parameters.
        counters: of the model; they become sums over the global batch, in place.
        duplicates: ranks that have the same tokens.

    Returns:
        the sums of of_tokens, as a vector, and of of_parameters.
    """
    values = torch.cat(
        [*(values[None] for values in of_tokens), *(counter.flatten() for counter in counters), of_parameters[None]]
    )
    dist.all_reduce(values, group=world)
    if duplicates > 1:  # not before the sum: a third of a count is rounded
        values[:-1] /= duplicates
    totals, *wholes = values[:-1].split([len(of_tokens), *(counter.numel() for counter in counters)])
    for counter, whole in zip(counters, wholes, strict=True):
        counter.copy_(whole.view_as(counter))
    return totals, values[-1]


def check_same_everywhere(value: str, what: str, *, group: dist.ProcessGroup) -> None:
    """Check that a value is the same on all ranks; files may differ from node to node.

    Raises:
        UserError: the value differs.
    """
    values = gather(value, group)
    if odd := [rank for rank, other in enumerate(values) if other != values[0]]:
        raise UserError(f"{what} of rank {odd[0]} is not that of rank 0 ({values[odd[0]]} and {values[0]})")


def ranks_text(ranks: Sequence[int]) -> str:
    """Return words for ranks: rank 1; ranks 0, 2-3."""
    return f"rank{'s' * (len(ranks) != 1)} {', '.join(runs_of(ranks))}"


def runs_of(numbers: Iterable[int]) -> list[str]:
    """Return numbers in ascending order, and those in a row as one text: 0, 2-3."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return [str(first) if first == last else f"{first}-{last}" for first, last in runs]


def named_ranks(ranks: Sequence[int], hosts: Sequence[str], *, most: int = 3) -> str:
    """Return words for some ranks, with their hosts: ranks 8-15 on host-b and rank 17 on host-c.

    Args:
        ranks: in ascending order.
        hosts: host of every rank of the job.
        most: hosts that are named; the others are counted.
    """
    by_host: dict[str, list[int]] = {}
    for rank in ranks:
        by_host.setdefault(hosts[rank], []).append(rank)
    named = [f"{ranks_text(some)} on {host}" for host, some in by_host.items()]
    if len(named) > most:
        named = [*named[: most - 1], f"those of {len(named) - most + 1} more hosts"]
    return named[0] if len(named) == 1 else f"{', '.join(named[:-1])} and {named[-1]}"


class AgreedStop:
    """Flag of this rank that travels in the all-reduce of each step, and the sum of all ranks' flags.

    On GPUs the sum of a step is read one step later, when it has long been computed. So the host is at most one step
    ahead of the device, and the device never waits for the host.

    Args:
        device: device of the step's losses.
    """

    def __init__(self, requests: StopRequests, device: torch.device) -> None:
        self._requests = requests
        self._flag = torch.zeros(1, device=device)
        on_gpu = device.type == "cuda"
        self._on_host = [torch.zeros(1, pin_memory=True) for _ in range(2)] if on_gpu else []
        self._copied: torch.cuda.Event | None = None

    def flag(self) -> Tensor:
        """Return this rank's flag [1] for `Step`: 1 if this process knows a reason to stop."""
        if self._requests.requested():
            self._flag.fill_(1)
        return self._flag

    def is_asked(self) -> bool:
        """Return whether any rank asks to stop now, in validation. Every rank calls it at the same time."""
        flag = torch.tensor(self._requests.requested())
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)  # on the CPU, and of one byte
        return bool(flag)

    def is_agreed(self, flags: Tensor) -> bool:
        """Return whether the run stops after this step, equal on all ranks. Every rank calls it after every step.

        Args:
            flags: sum over the ranks, `StepResult.stop_flags`.
        """
        self._requests.begin_training()
        if not self._on_host:
            return bool(flags > 0)
        if self._copied is not None and not self._copied.query():
            self._copied.synchronize()
        stops = self._copied is not None and float(self._on_host[0]) > 0
        self._on_host.reverse()
        self._on_host[0].copy_(flags, non_blocking=True)
        self._copied = torch.cuda.Event()
        self._copied.record()
        return stops
