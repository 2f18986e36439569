"""Moments in 8 or 4 bits: optimizers of torchao.optim keep them as a tensor subclass, made of codes and of one scale
for each block of elements."""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from titanlite.runtime.errors import UserError
from titanlite.runtime.private_torch import local_tensor

LEAST = 4096
"""Elements of a shard below which torchao keeps moments in float32."""
TABLES = ("qmap",)
"""What is in such a tensor and follows from its class: the value of each code."""


def is_quantized(value: Any) -> bool:
    return isinstance(value, Tensor) and is_traceable_wrapper_subclass(local_tensor(value))


def pieces(value: Tensor) -> dict[str, Tensor]:
    """Plain tensors that make up a quantized one, by name. They are sharded as it is, and share its memory."""
    part = local_tensor(value)
    names: list[str] = part.__tensor_flatten__()[0]  # pyright: ignore[reportAttributeAccessIssue]
    return {name: _sharded(getattr(part, name), value) for name in names if name not in TABLES}


def _sharded(piece: Tensor, value: Tensor) -> Tensor:
    """As a part of a whole tensor: of the value's shape; or with one element for several of the value's, in order. If
    those end with rows, it is sharded by rows, and shards need not be even."""
    part = local_tensor(value)
    shape, each, row = value.shape, part.numel() // piece.numel(), value.shape[1:].numel()
    if each != 1 and row % each == 0:
        shape = torch.Size([shape[0], row // each])
    elif each != 1:
        shape = torch.Size([value.numel() // each])
    piece = piece.view(-1, *shape[1:])
    if not isinstance(value, DTensor):
        return piece
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(piece, value.device_mesh, value.placements, run_check=False, shape=shape, stride=stride)


def block_of(kind: type[torch.optim.Optimizer], args: Mapping[str, Any]) -> int | None:
    """Elements that have a scale together, of a class of torchao.optim; None of others."""
    parameter = inspect.signature(kind).parameters.get("block_size")
    if parameter is None or not kind.__module__.startswith("torchao.optim"):
        return None
    return args.get("block_size", parameter.default)


def check_shards(name: str, parameter: Tensor, block: int) -> None:
    """Raises:
    UserError: ranks would keep the moments of a parameter in different ways, or have parts of the same block.
    """
    if not isinstance(parameter, DTensor):
        return
    shards = 1
    for placement, size in zip(parameter.placements, parameter.device_mesh.shape, strict=True):
        shards *= size if placement.is_shard() else 1
    rows, row = parameter.shape[0], parameter.shape[1:].numel()
    largest = -(-rows // shards)
    sizes = {max(0, min(largest, rows - largest * rank)) * row for rank in range(shards)}
    kept = {size >= LEAST and size % block == 0 for size in sizes}
    if len(sizes) > 1 and (len(kept) > 1 or (kept == {True} and row % block)):
        raise UserError(
            f"{name} {[*parameter.shape]} cannot have quantized moments on {shards} shards: {rows} rows do not divide "
            f"evenly, and shards would not be whole blocks of {block} elements. Give it an [[optimizer.groups]] with "
            "another optimizer, or change the number of shards"
        )
