"""Helpers for DTensors: tensors that are sharded like another one."""

from torch import Tensor
from torch.distributed.tensor import DTensor


def in_place_of(tensor: Tensor, part: Tensor) -> Tensor:
    """A tensor that is sharded as another one is, with this as its part on this rank."""
    if not isinstance(tensor, DTensor):
        return part
    mesh, placements = tensor.device_mesh, tensor.placements
    return DTensor.from_local(part, mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride())
