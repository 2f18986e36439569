"""A device mesh of NVIDIA GPUs whose communicators are split from that of all ranks."""

import inspect
import math

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh


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
