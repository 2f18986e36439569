"""Hash of a state: one for the same values, however they are sharded.

The hash of a tensor is the sum, modulo 2^64, of its elements' bits times random numbers that depend on the name of the
tensor and the index of the element (multilinear hashing, arXiv:1202.4961). So each rank adds its own part, where it is,
and the sums are added over ranks in any order.
"""

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from titanlite.ops.hash_random import random_bits, salt
from titanlite.runtime.dtensor import GlobalIndices, sharded_axes
from titanlite.runtime.private_torch.tensors import local_tensor

CHUNK, GPU_CHUNK = 2**18, 2**22
"""Elements that are hashed at once: few enough for a CPU's cache, and enough to keep a GPU busy."""
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def join_hashes(hashes: Mapping[str, str]) -> str:
    """Return the hash of a state, 64 hexadecimal digits, from those of its tensors by name."""
    return hashlib.sha256("\n".join(f"{name} {hashes[name]}" for name in sorted(hashes)).encode()).hexdigest()


@torch.no_grad()
def hash_tensors(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the hash of each tensor, the same on all ranks. Every rank that has a part must call it."""
    sums = {name: sum_of_part(name, local_tensor(tensor), GlobalIndices(tensor)) for name, tensor in tensors.items()}
    by_groups: dict[tuple[dist.ProcessGroup, ...], list[str]] = {}
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor) and (axes := sharded_axes(tensor)):
            by_groups.setdefault(tuple(tensor.device_mesh.get_group(axis) for axis in axes), []).append(name)
            sums[name] = sums[name].to(tensor.device_mesh.device_type)
    for groups, names in by_groups.items():
        vector = torch.stack([sums[name] for name in names])
        for group in groups:
            dist.all_reduce(vector, group=group)
        sums |= dict(zip(names, vector, strict=True))
    return {name: describe(tensor.dtype, tensor.shape, int(sums[name])) for name, tensor in tensors.items()}


def describe(dtype: torch.dtype, shape: Sequence[int], total: int) -> str:
    """Return the hash of a tensor: its dtype, shape and sum."""
    return f"{str(dtype).removeprefix('torch.')} {[*shape]} {total % 2**64:016x}"


def sum_of_part(name: str, part: Tensor, indices: Callable[[int, int, torch.device], Tensor]) -> Tensor:
    """Return the sum over a part of a tensor, an int64 scalar that has wrapped around.

    Args:
        name: of the tensor.
        indices: returns the indices in the whole tensor of `count` elements of the part from `start` on.
    """
    bits = part.detach().contiguous().view(-1).view(INTEGERS[part.element_size()])
    seed = salt(name)
    total = torch.zeros((), dtype=torch.int64, device=part.device)
    chunk = CHUNK if part.device.type == "cpu" else GPU_CHUNK
    for start in range(0, len(bits), chunk):
        some = bits[start : start + chunk].long()
        total += (some * random_bits(seed, indices(start, len(some), part.device))).sum()
    return total


def indices_of_box(
    shape: Sequence[int], offsets: Iterable[int], sizes: Sequence[int]
) -> Callable[[int, int, torch.device], Tensor]:
    """Return the function of indices for a box of a tensor's elements, as `sum_of_part` takes it."""
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    dims = [*zip(offsets, sizes, strides, strict=True)]

    def indices(start: int, count: int, device: torch.device) -> Tensor:
        place = torch.arange(start, start + count, device=device)
        found = torch.zeros_like(place)
        for offset, size, stride in reversed(dims):
            found += (place % size + offset) * stride
            place //= size
        return found

    return indices
