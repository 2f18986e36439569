"""Degrees -> DeviceMesh, and what follows from it. This is the only file that knows the axes by name and order."""

import inspect

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from titanlite.config.schema import Degrees, Parallelism


def build_mesh(parallelism: Parallelism, *, world_size: int, device_type: str) -> DeviceMesh:
    """Return the 2D mesh (replicate, shard), also on one process: (1, 1).

    Neighbouring ranks are in one shard group: sharding communicates most, and neighbours share the fast links of a
    node.

    Raises:
        ValueError: the degrees do not multiply to world_size.
    """
    degrees = parallelism.degrees(world_size)
    if device_type == "cuda" and "backend" in inspect.signature(dist.split_group).parameters:  # torch 2.13
        return _split_world(degrees)
    return init_device_mesh(device_type, (*degrees,), mesh_dim_names=degrees._fields)


def _split_world(degrees: Degrees) -> DeviceMesh:
    """Return the mesh with communicators split from that of all ranks.

    `init_device_mesh` splits gloo's group too, which no axis uses: it connects all pairs of ranks again, and every rank
    prints a warning.
    """
    world = dist.group.WORLD
    ranks = torch.arange(degrees.data_parallel).view(*degrees)
    groups = []
    for axis, (name, size) in enumerate(degrees._asdict().items()):
        parts = ranks.movedim(axis, -1).reshape(-1, size).tolist()
        is_world = size == degrees.data_parallel
        group = world if is_world else dist.split_group(split_ranks=parts, group_desc=name, backend="cuda:nccl")
        assert group is not None
        groups.append(group)
    return DeviceMesh.from_group(groups, "cuda", mesh=ranks, mesh_dim_names=degrees._fields)


def sharding_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the mesh for `fully_shard`: both axes, or the shard axis alone where there is one replica. That saves an
    all-reduce over one rank."""
    return mesh if has_replicas(mesh) else mesh["shard"]


def has_replicas(mesh: DeviceMesh) -> bool:
    """Return True if several ranks hold the same shard of a parameter (HSDP, DDP)."""
    return mesh["replicate"].size() > 1


def shard_degree_of(mesh: DeviceMesh) -> int:
    """Return the number of ranks that a replica's parameters are sharded over."""
    return mesh["shard"].size()


def data_parallel_rank(mesh: DeviceMesh) -> tuple[int, int]:
    """Return (rank, size) among the ranks that read different data: both axes, flattened."""
    return mesh.get_rank(), mesh.size()


def loss_group(mesh: DeviceMesh) -> dist.ProcessGroup:
    """Return the ranks whose token losses and token counts are summed: those that compute the loss of different tokens.

    FSDP averages gradients over as many ranks. Both axes hold different tokens, so the group is every process.
    """
    return world_group(mesh)


def world_group(mesh: DeviceMesh) -> dist.ProcessGroup:
    """Return the group of all processes. Each of them holds a part of the parameters or a replica of one."""
    group = dist.group.WORLD
    assert group is not None
    assert mesh.size() == group.size()
    return group


def axis_sizes(mesh: DeviceMesh) -> dict[str, int]:
    """Return the size of each axis by name, for records and reports."""
    return dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True))
