"""Helpers for DTensors on any mesh: parts, replicas, and the place of a part in the whole tensor."""

import math
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from titanlite.runtime.private_torch.tensors import local_tensor, wrapped_tensors


def sharded_dim(placement: Placement) -> int | None:
    """Return the tensor dimension that a placement shards, or None for replicas.

    `Placement.is_shard()` is false for FSDP on top of tensor parallelism, which has a placement class of its own.

    Raises:
        ValueError: the ranks hold partial sums.
    """
    if placement.is_partial():
        raise ValueError("a tensor of partial sums has no shards: reduce it first")
    return None if placement.is_replicate() else placement.dim  # pyright: ignore[reportAttributeAccessIssue]


def sharded_axes(tensor: Tensor) -> dict[int, int]:
    """Return the mesh axes that shard a tensor, each with the tensor dimension. Axes of one rank shard nothing."""
    if not isinstance(tensor, DTensor):
        return {}
    dims = {axis: sharded_dim(placement) for axis, placement in enumerate(tensor.placements)}
    return {axis: dim for axis, dim in dims.items() if dim is not None and tensor.device_mesh.size(axis) > 1}


def count_shards(tensor: Tensor) -> int:
    """Count the different parts into which a tensor is sharded."""
    return (
        math.prod(tensor.device_mesh.size(axis) for axis in sharded_axes(tensor)) if isinstance(tensor, DTensor) else 1
    )


def count_replicas(tensor: Tensor, ranks: int) -> int:
    """Count the ranks that hold the same part of a tensor, of those that hold one."""
    shards = count_shards(tensor)
    assert ranks % shards == 0, "the ranks do not hold all shards"
    return ranks // shards


def chunk_sizes(size: int, chunks: int) -> list[int]:
    """Return how many of `size` elements `Shard` gives each of some ranks: as `torch.chunk`, then none."""
    largest = -(-size // chunks)
    return [min(largest, max(0, size - rank * largest)) for rank in range(chunks)]


def local_sizes(tensor: Tensor) -> set[int]:
    """Return the numbers of elements that parts of a tensor have on any rank."""
    by_dim = [{size} for size in tensor.shape]
    if isinstance(tensor, DTensor):
        for axis, dim in sharded_axes(tensor).items():
            ranks = tensor.device_mesh.size(axis)
            by_dim[dim] = {part for size in by_dim[dim] for part in chunk_sizes(size, ranks)}
    return {math.prod(sizes) for sizes in product(*by_dim)}


def from_local_like(part: Tensor, tensor: Tensor) -> Tensor:
    """Return a tensor that is sharded like another one, of the same shape, and has `part` on this rank."""
    if not isinstance(tensor, DTensor):
        return part
    mesh, placements = tensor.device_mesh, tensor.placements
    if part.device.type not in (mesh.device_type, "meta"):  # from_local would copy the part to the device of the mesh
        like = torch.empty_like(tensor, dtype=part.dtype, device=part.device)
        local_tensor(like).set_(part.untyped_storage(), part.storage_offset(), part.shape, part.stride())
        return like
    return DTensor.from_local(part, mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride())


def unwrapped(tensor: Any) -> Any:
    """Unwrap a tensor subclass around a local shard, same memory: a checkpoint must load without torchao."""
    tensor = tensor.detach() if isinstance(tensor, Tensor) else tensor
    inner = wrapped_tensors(local_tensor(tensor)).get("_tensor") if isinstance(tensor, DTensor) else None
    return tensor if inner is None else from_local_like(inner, tensor)


def own_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor, without a subclass around it: the memory in use."""
    return local_tensor(unwrapped(tensor))


def slice_like(whole: Tensor, tensor: Tensor) -> Tensor:
    """Return this rank's part of `whole` if that were sharded like another tensor. Nothing is sent.

    Args:
        whole: the same values on every rank.
    """
    if not isinstance(tensor, DTensor):
        return whole
    return distribute_tensor(whole, tensor.device_mesh, tensor.placements, src_data_rank=None).to_local()


class GlobalIndices:
    """Index in the whole tensor of each element of this rank's part. Both are counted in row-major order.

    A value that depends on this index alone is the same on every layout.

    Args:
        tensor: sharded by any dimensions over any axes of its mesh, or not sharded.
    """

    def __init__(self, tensor: Tensor) -> None:
        by_dim = [_indices_along(tensor, dim) for dim in range(tensor.ndim)] or [torch.zeros(1).long()]
        strides = [math.prod(tensor.shape[dim + 1 :]) for dim in range(tensor.ndim)] or [1]
        rows, others = by_dim[0], by_dim[1:]
        are_whole = all(len(index) == size for index, size in zip(others, tensor.shape[1:], strict=True))
        first = int(rows[0]) if len(rows) else 0
        is_run = are_whole and torch.equal(rows, torch.arange(first, first + len(rows), device=rows.device))
        self.first = first * strides[0] if is_run else None
        """Index of the first element, where the part is one run of elements: sharded by rows, or whole. Else None."""
        self._by_dim = [] if is_run else [index * stride for index, stride in zip(by_dim, strides, strict=True)]
        """Elsewhere, what each position along each dimension adds to the index."""

    def __call__(self, start: int, count: int, device: torch.device) -> Tensor:
        """Return int64 [count]: the indices of the elements [start, start + count) of this rank's part."""
        if self.first is not None:
            return torch.arange(self.first + start, self.first + start + count, device=device)
        local = torch.arange(start, start + count, device=device)
        indices = torch.zeros_like(local)
        for along_dim in reversed(self._by_dim):
            indices += along_dim.to(device)[local % len(along_dim)]
            local //= len(along_dim)
        return indices


def _indices_along(tensor: Tensor, dim: int) -> Tensor:
    """Return the indices that this rank's part has along one dimension of the whole tensor."""
    indices = torch.arange(tensor.shape[dim])
    if not isinstance(tensor, DTensor):
        return indices
    mesh, placements = (
        tensor.device_mesh,
        [placement if sharded_dim(placement) == dim else Replicate() for placement in tensor.placements],
    )
    if all(type(placement) in (Shard, Replicate) for placement in placements):  # this needs no device of the mesh
        for axis, placement in enumerate(placements):
            if isinstance(placement, Shard):
                sizes = chunk_sizes(len(indices), mesh.size(axis))
                indices = indices.split(sizes)[mesh.get_local_rank(axis)]
        return indices
    shaped = indices.view([-1 if other == dim else 1 for other in range(tensor.ndim)])
    return distribute_tensor(shaped, mesh, placements, src_data_rank=None).to_local().flatten()
