"""Helpers for DTensors, on every rank of meshes whose other ranks are not there."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Partial, Placement, Replicate, Shard, distribute_tensor

from tests.helpers import fake_mesh
from titanlite.runtime.dtensor import (
    GlobalIndices,
    count_replicas,
    count_shards,
    from_local_like,
    local_sizes,
    sharded_axes,
    slice_like,
)
from titanlite.runtime.private_torch.tensors import local_tensor

CPU = torch.device("cpu")
LAYOUTS: list[tuple[tuple[int, ...], list[Placement], int]] = [
    ((4,), [Shard(0)], 1),
    ((4,), [Shard(1)], 1),
    ((2, 2), [Replicate(), Shard(0)], 2),
    ((2, 2), [Shard(0), Shard(0)], 1),
    ((2, 2), [Shard(0), Shard(1)], 1),
    ((1, 4), [Shard(1), Shard(0)], 1),
    ((2, 1, 2), [Shard(1), Shard(0), Shard(1)], 1),
]
"""Degrees of a mesh of four ranks, placements, and replicas of each part."""


@pytest.mark.parametrize(("degrees", "placements", "replicas"), LAYOUTS)
@pytest.mark.parametrize("shape", [(7, 10, 3), (2, 3, 5), (8, 8, 8)])
def test_indices_and_replicas(
    degrees: tuple[int, ...], placements: list[Placement], replicas: int, shape: tuple[int, ...]
) -> None:
    """The values of a tensor that counts its elements are their indices; every element is somewhere."""
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    seen, sizes, expected_sizes = torch.zeros(whole.numel(), dtype=torch.int64), set(), set()
    for rank in range(4):
        with fake_mesh(rank, degrees) as mesh:
            tensor = distribute_tensor(whole, mesh, placements, src_data_rank=None)
            expected = local_tensor(tensor).flatten()
            indices = GlobalIndices(tensor)
            assert torch.equal(indices(0, len(expected), CPU), expected)
            count = len(expected) // 2
            assert torch.equal(indices(count, count, CPU), expected[count : 2 * count])
            assert torch.equal(slice_like(whole, tensor), local_tensor(tensor))
            again = from_local_like(local_tensor(tensor), tensor)
            assert again.shape == tensor.shape
            assert local_tensor(again).data_ptr() == local_tensor(tensor).data_ptr()
            assert dist.group.WORLD is not None
            assert count_replicas(tensor, dist.group.WORLD) == replicas
            assert count_shards(tensor) == 4 // replicas
            expected_sizes = local_sizes(tensor)
            sizes.add(len(expected))
            seen[expected] += 1
    assert torch.equal(seen, torch.full_like(seen, replicas))
    assert sizes == expected_sizes


def test_a_plain_tensor_is_whole_on_every_rank() -> None:
    whole = torch.arange(6.0).view(2, 3)
    with fake_mesh(1, (4,)):
        assert dist.group.WORLD is not None
        assert count_replicas(whole, dist.group.WORLD) == 4
    assert sharded_axes(whole) == {}
    assert local_sizes(whole) == {6}
    assert count_shards(whole) == 1
    assert GlobalIndices(whole)(1, 3, CPU).tolist() == [1, 2, 3]
    assert GlobalIndices(torch.tensor(1.0))(0, 1, CPU).tolist() == [0]
    assert slice_like(whole, whole) is whole
    assert from_local_like(whole, whole) is whole


def test_partial_sums_have_no_shards() -> None:
    with fake_mesh(0, (4,)) as mesh:
        tensor = distribute_tensor(torch.ones(4), mesh, [Replicate()], src_data_rank=None)
        partial = tensor.from_local(local_tensor(tensor), mesh, [Partial()])
        with pytest.raises(ValueError, match="reduce it first"):
            sharded_axes(partial)
