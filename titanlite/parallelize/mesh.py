"""Degrees -> DeviceMesh, and what follows from it. The only place that knows the axes by name and order."""

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from titanlite.config.schema import Parallelism


def build_mesh(parallelism: Parallelism, *, world_size: int, device_type: str) -> DeviceMesh:
    """The 2D mesh (replicate, shard), also on one process: (1, 1).

    Neighbouring ranks are in one shard group: sharding talks most, and neighbours share the fast links of a node.

    Raises:
        ValueError: the degrees do not multiply to world_size.
    """
    degrees = parallelism.degrees(world_size)
    return init_device_mesh(device_type, degrees, mesh_dim_names=("replicate", "shard"))


def sharding_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """What `fully_shard` is given: both axes, or the shard axis alone where there is one replica, which saves an
    all-reduce with nobody."""
    return mesh if mesh["replicate"].size() > 1 else mesh["shard"]


def data_parallel_rank(mesh: DeviceMesh) -> tuple[int, int]:
    """(rank, size) among all processes that read different data: both axes, flattened."""
    return mesh.get_rank(), mesh.size()


def data_parallel_group(mesh: DeviceMesh) -> dist.ProcessGroup:
    """The group over which losses and token counts are summed: both axes, which is every process."""
    group = dist.group.WORLD
    assert group is not None
    assert mesh.size() == group.size()
    return group
