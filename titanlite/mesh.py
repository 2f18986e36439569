# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false
"""Degrees -> DeviceMesh, and what follows from it. This is the only file that knows the axes by name and order."""

import inspect
import math

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from titanlite.runtime.private_torch.process_groups import flatten_axes, join_meshes, unflatten_axis
from titanlite.schema import Parallelism

# A device mesh of NVIDIA GPUs whose communicators are split from that of all ranks.


def can_split_groups() -> bool:
    """Return True if `dist.split_group` can leave out gloo: since torch 2.13."""
    return "backend" in inspect.signature(dist.split_group).parameters


def split_world(axes: dict[str, int]) -> DeviceMesh:
    """Return the mesh of all ranks with axes of these names and sizes.

    `init_device_mesh` splits gloo's group too, which no axis uses: it connects all pairs of ranks again, and every rank
    prints a warning.
    """
    world = dist.group.WORLD
    ranks = torch.arange(math.prod(axes.values())).view(*axes.values())
    groups = []
    for axis, (name, size) in enumerate(axes.items()):
        parts = ranks.movedim(axis, -1).reshape(-1, size).tolist()
        is_world = size == ranks.numel()
        group = world if is_world else dist.split_group(split_ranks=parts, group_desc=name, backend="cuda:nccl")
        assert group is not None
        groups.append(group)
    return DeviceMesh.from_group(groups, "cuda", mesh=ranks, mesh_dim_names=(*axes,))


CONTEXT, TENSOR, PIPELINE = "context", "tensor", "pipeline"
EXPERT, EXPERT_SHARD = "expert", "expert_shard"
ACTIVATION_AXES = (CONTEXT, EXPERT, TENSOR, PIPELINE)
"""Axes over which activations are communicated, not parameters."""
FSDP = "fsdp"
"""Axis of the ranks that a replica's parameters are sharded over, where those are several axes."""


def build_mesh(parallelism: Parallelism, *, world_size: int, device_type: str) -> DeviceMesh:
    """Return the mesh (replicate, shard), also on one process: (1, 1). Where their degree is not 1, `pipeline` comes
    before them, and further axes follow.

    Neighbouring ranks are in one group of the last axis. That axis communicates most, and neighbours share the fast
    links of a node.

    Raises:
        ValueError: the degrees do not multiply to world_size.
    """
    axes = parallelism.degrees(world_size).axes()
    if device_type == "cuda" and can_split_groups():
        return split_world(axes)
    return init_device_mesh(device_type, (*axes.values(),), mesh_dim_names=(*axes,))


def sharding_mesh(mesh: DeviceMesh, *, with_replicas: bool = True) -> DeviceMesh:
    """Return the mesh for `fully_shard`: replicas and shards, or the shards alone where there is one replica. That
    saves an all-reduce over one rank.

    Args:
        with_replicas: whether FSDP adds gradients over replicas.
    """
    if not (with_replicas and has_replicas(mesh)):
        return _shards(mesh)
    return join_meshes(mesh["replicate"], _shards(mesh)) if CONTEXT in axis_sizes(mesh) else mesh["replicate", "shard"]


def _shards(mesh: DeviceMesh) -> DeviceMesh:
    """Return the axis over which a replica's parameters are sharded. It spans the ranks that split sequences."""
    return flatten_axes(mesh, ("shard", CONTEXT), FSDP) if CONTEXT in axis_sizes(mesh) else mesh["shard"]


def expert_meshes(mesh: DeviceMesh, degree: int, *, with_replicas: bool = True) -> tuple[DeviceMesh, DeviceMesh]:
    """Return the mesh for `fully_shard` of experts, and that of different parts: expert, and tensor where layers split.

    Both are another view of the ranks that a replica's parameters are sharded over: neighbours have different experts,
    and the ranks with the same experts shard those.

    Args:
        degree: of expert parallelism; divides the number of those ranks.
        with_replicas: whether FSDP adds gradients over replicas.
    """
    shards = _shards(mesh)
    view = unflatten_axis(shards, (shards.size() // degree, degree), ("expert_shard", EXPERT))
    sharding = view[EXPERT_SHARD]
    if with_replicas and has_replicas(mesh):
        sharding = join_meshes(mesh["replicate"], sharding)
    return sharding, join_meshes(view[EXPERT], mesh[TENSOR]) if TENSOR in axis_sizes(mesh) else view[EXPERT]


def has_replicas(mesh: DeviceMesh) -> bool:
    """Return True if several ranks hold the same shard of a parameter (HSDP, DDP)."""
    return mesh["replicate"].size() > 1


def replica_group(mesh: DeviceMesh) -> dist.ProcessGroup | None:
    """Return the ranks that hold the same shards of parameters, or None if this rank is alone with them."""
    return mesh.get_group("replicate") if has_replicas(mesh) else None


def shard_degree_of(mesh: DeviceMesh) -> int:
    """Return the number of ranks that a replica's parameters are sharded over."""
    return _shards(mesh).size()


def data_parallel_rank(mesh: DeviceMesh) -> tuple[int, int]:
    """Return (rank, size) among the ranks that read different sequences: replicas and shards, flattened."""
    replicate, shard = mesh["replicate"], mesh["shard"]
    return replicate.get_local_rank() * shard.size() + shard.get_local_rank(), replicate.size() * shard.size()


def context_rank(mesh: DeviceMesh) -> tuple[int, int]:
    """Return (rank, size) among the ranks that split one sequence."""
    return (mesh.get_local_rank(CONTEXT), mesh[CONTEXT].size()) if CONTEXT in axis_sizes(mesh) else (0, 1)


def context_group(mesh: DeviceMesh) -> dist.ProcessGroup | None:
    """Return the ranks that split one sequence, or None if sequences are whole."""
    return mesh.get_group(CONTEXT) if CONTEXT in axis_sizes(mesh) else None


def tensor_mesh(mesh: DeviceMesh) -> DeviceMesh | None:
    """Return the axis of the ranks that compute one layer together, or None if layers are whole."""
    return mesh[TENSOR] if TENSOR in axis_sizes(mesh) else None


def pipeline_mesh(mesh: DeviceMesh) -> DeviceMesh | None:
    """Return the axis of the ranks that have different blocks, or None if each rank has a part of all."""
    return mesh[PIPELINE] if PIPELINE in axis_sizes(mesh) else None


def ranks_of_stage(mesh: DeviceMesh) -> int:
    """Return the number of ranks that have the same blocks, or parts of them."""
    axis = pipeline_mesh(mesh)
    return mesh.size() // (axis.size() if axis else 1)


def loss_group(mesh: DeviceMesh, *, with_replicas: bool = True) -> dist.ProcessGroup:
    """Return the ranks whose token losses and token counts are summed: those that compute the loss of different tokens.

    FSDP averages gradients over as many ranks. Ranks of the axes `tensor` and `pipeline` have the same tokens.

    Args:
        with_replicas: whether gradients are added over replicas.
    """
    axes = tuple(axis for axis in axis_sizes(mesh) if axis not in (TENSOR, PIPELINE))
    if has_replicas(mesh) and not with_replicas:
        return _shards(mesh).get_group()
    if len(axes) == len(axis_sizes(mesh)):
        return world_group(mesh)
    if not has_replicas(mesh):
        return _shards(mesh).get_group()
    return flatten_axes(mesh, axes, "tokens").get_group()


def group_of_replica(mesh: DeviceMesh) -> dist.ProcessGroup:
    """Return the ranks of this rank's replica: all that share its parameters or compute them together."""
    axes = tuple(axis for axis in axis_sizes(mesh) if axis != "replicate")
    return (flatten_axes(mesh, axes, "replica") if TENSOR in axes else _shards(mesh)).get_group()


def world_group(mesh: DeviceMesh) -> dist.ProcessGroup:
    """Return the group of all processes. Each of them holds a part of the parameters or a replica of one."""
    group = dist.group.WORLD
    assert group is not None
    assert mesh.size() == group.size()
    return group


def axis_sizes(mesh: DeviceMesh) -> dict[str, int]:
    """Return the size of each axis by name, for records and reports."""
    return dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True))


def axis_groups(mesh: DeviceMesh) -> dict[str, dist.ProcessGroup]:
    """Return this rank's process group of each axis, by name. That of `shard` shards the parameters of a replica."""
    groups = {axis: mesh.get_group(axis) for axis, size in axis_sizes(mesh).items() if size > 1}
    return groups | ({"shard": _shards(mesh).get_group()} if shard_degree_of(mesh) > 1 else {})


def root_axes(axis: str) -> tuple[str, ...]:
    """Return the names in the whole mesh of an axis of a parameter's mesh."""
    return ("shard", CONTEXT) if axis in (FSDP, EXPERT, EXPERT_SHARD) else (axis,)
