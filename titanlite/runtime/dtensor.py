"""Helpers for DTensors: this rank's part of a tensor, and tensors sharded like another one."""

from torch import Tensor
from torch.distributed.tensor import DTensor


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, sharded or not. `to_local()` would also make a way back for gradients, which takes
    longer than writing a small tensor."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def in_place_of(tensor: Tensor, part: Tensor) -> Tensor:
    """A tensor that is sharded as another one is, with this as its part on this rank."""
    if not isinstance(tensor, DTensor):
        return part
    mesh, placements = tensor.device_mesh, tensor.placements
    return DTensor.from_local(part, mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride())
