"""Process groups: timeouts, counts of collectives, and calls whose result or failure all ranks share."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Literal, TypeVar

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives
from torch import Tensor
from torch._C._distributed_c10d import _dump_fr_trace_json  # pyright: ignore[reportAttributeAccessIssue]
from torch.distributed import distributed_c10d
from torch.distributed.checkpoint.utils import _DistWrapper
from torch.distributed.device_mesh import DeviceMesh

# Parts of a device mesh that PyTorch's public slicing does not give.


def flatten_axes(mesh: DeviceMesh, axes: tuple[str, ...], name: str) -> DeviceMesh:
    """Return neighbouring axes of a mesh as one axis, with a process group of its own. Further calls return the same.

    Args:
        name: of the new axis.
    """
    return mesh[axes]._flatten(name)


def unflatten_axis(mesh: DeviceMesh, sizes: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """Return a mesh of one axis as a mesh of several, each with process groups of its own."""
    return mesh._unflatten(0, sizes, names)


def join_meshes(*meshes: DeviceMesh) -> DeviceMesh:
    """Return one mesh of the axes of several parts of a mesh. No process group is made."""
    return DeviceMesh._concatenate([*meshes])


def all_gather(x: Tensor, size: int, name: str) -> Tensor:
    """Return the tensors of all ranks along dim 0, in the order of ranks.

    Args:
        size, name: of the process group.
    """
    gathered = torch.ops._c10d_functional.all_gather_into_tensor(x.contiguous(), size, name)
    return torch.ops._c10d_functional.wait_tensor(gathered)


def reduce_scatter(x: Tensor, size: int, name: str) -> Tensor:
    """Sum tensors over all ranks, and return this rank's part of dim 0; arguments as of `all_gather`."""
    total = torch.ops._c10d_functional.reduce_scatter_tensor(x.contiguous(), "sum", size, name)
    return torch.ops._c10d_functional.wait_tensor(total)


def all_reduce(x: Tensor, operation: Literal["sum", "max"], name: str) -> Tensor:
    """Return the sums, or the largest values, of the tensors of all ranks of the process group `name`."""
    reduced = torch.ops._c10d_functional.all_reduce(x.contiguous(), operation, name)
    return torch.ops._c10d_functional.wait_tensor(reduced)


def exchange_rows(x: Tensor, to_others: list[int], from_others: list[int], name: str) -> Tensor:
    """Send rows to each rank, and return the rows from each, both in the order of ranks.

    Args:
        to_others: numbers of rows to each rank; their sum is len(x).
        from_others: numbers of rows from each rank.
        name: of the process group.
    """
    return wait_for_rows(send_rows(x, to_others, from_others, name))


def send_rows(x: Tensor, to_others: list[int], from_others: list[int], name: str) -> Tensor:
    """Begin `exchange_rows`. The values of the result come with `wait_for_rows`."""
    return torch.ops._c10d_functional.all_to_all_single(x.contiguous(), from_others, to_others, name)


def wait_for_rows(received: Tensor) -> Tensor:
    """Let the current stream, or on a CPU this thread, wait until rows are received."""
    return torch.ops._c10d_functional.wait_tensor(received)


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
        but_for: beginning of the description (`group_desc`) of groups that keep theirs.
    """
    # public since torch 2.14, where the private name warns
    set_timeout = getattr(dist, "set_timeout", None) or distributed_c10d._set_pg_timeout
    for group in distributed_c10d._world.pg_map:
        if not group.group_desc.startswith(but_for):
            set_timeout(timedelta(seconds=seconds), group)


OPEN_RUN = "titanlite run"
"""Description of the process group of all ranks while a run uses it."""


@contextmanager
def naming_open_run() -> Iterator[None]:
    """Mark the process group of all ranks as that of an open run."""
    group = distributed_c10d._get_default_group()
    before = group.group_desc
    group._set_group_desc(OPEN_RUN)
    try:
        yield
    finally:
        group._set_group_desc(before)


def has_open_run() -> bool:
    """Return whether a run of this process is open."""
    return dist.is_initialized() and distributed_c10d._get_default_group().group_desc == OPEN_RUN


def count_collectives() -> dict[str, int]:
    """Return the collectives that this process has started, by name and description of the process group.

    Another thread than training's may call it. The numbers are those by which PyTorch's flight recorder names
    collectives; groups of one rank are left out.
    """
    counts = {}
    for group in [*distributed_c10d._world.pg_map]:
        with suppress(RuntimeError):  # a backend that does not count, or a group that is being destroyed
            if group.size() > 1:
                backends = {
                    id(backend): backend for backend in (group._get_backend(device) for device in group._device_types)
                }
                counts[f"{group.group_name} ({group.group_desc})"] = sum(
                    backend._get_sequence_number_for_group()  # pyright: ignore[reportAttributeAccessIssue]
                    for backend in backends.values()
                )
    return counts


def connect_to_store() -> dist.Store:
    """Return the store of the process group by a new connection: its calls do not wait for those of other threads."""
    return distributed_c10d._get_default_store().clone()  # pyright: ignore[reportAttributeAccessIssue]


def recent_collectives() -> bytes:
    """Return the flight recorder's latest collectives of this process, as JSON.

    Since torch 2.15, each backend has a recorder of its own, that of NCCL's new implementation too. The one of the
    device is read, or gloo's, as where the process group has ended.
    """
    group = distributed_c10d.GroupMember.WORLD
    names = [group._get_backend(device).name() for device in group._device_types] if group else []
    try:
        return _dump_fr_trace_json(backend=next((name for name in names if name != "gloo"), "gloo"))
    except TypeError:  # an older release, with one recorder
        return _dump_fr_trace_json()
