"""Moments in 8 or 4 bits, as the optimizers of torchao.optim keep them: one scale for each block of codes."""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from titanlite.runtime.dtensor import count_shards, local_sizes, sharded_axes
from titanlite.runtime.errors import UserError
from titanlite.runtime.private_torch.tensors import local_tensor, wrapped_tensors

MIN_ELEMENTS = 4096
"""Smaller shards keep float32 moments in torchao."""
CONSTANTS = ("qmap",)
"""Inner tensors that follow from the class of the moment: the value of each code."""


def is_quantized(value: Any) -> bool:
    """Return whether a value of an optimizer's state is a tensor subclass of torchao, with codes and scales."""
    return isinstance(value, Tensor) and bool(wrapped_tensors(local_tensor(value)))


def inner_tensors(moment: Tensor) -> dict[str, Tensor]:
    """Return the plain tensors of a quantized moment, by name: codes and scales, sharded as it is, in its memory."""
    found = wrapped_tensors(local_tensor(moment))
    return {name: _sharded_like(inner, moment) for name, inner in found.items() if name not in CONSTANTS}


def _sharded_like(inner: Tensor, moment: Tensor) -> Tensor:
    """Return the local tensor `inner` as the part of a whole one.

    That has the moment's shape if there is one element for each of the moment's. With one element for each block, it
    has the moment's rows where blocks end with rows, so that shards may be uneven; else it has one dimension.
    """
    shape, block_size = moment.shape, local_tensor(moment).numel() // inner.numel()
    row = shape[1:].numel()
    if block_size != 1 and row % block_size == 0:
        shape = torch.Size([shape[0], row // block_size])
    elif block_size != 1:
        shape = torch.Size([moment.numel() // block_size])
    inner = inner.view(-1, *shape[1:])
    if not isinstance(moment, DTensor):
        return inner
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(inner, moment.device_mesh, moment.placements, run_check=False, shape=shape, stride=stride)


def block_size_of(optimizer_cls: type[torch.optim.Optimizer], args: Mapping[str, Any]) -> int | None:
    """Return the elements that share a scale in a class of torchao.optim; None for other classes."""
    parameter = inspect.signature(optimizer_cls).parameters.get("block_size")
    if parameter is None or not optimizer_cls.__module__.startswith("torchao.optim"):
        return None
    return args.get("block_size", parameter.default)


def is_quantized_size(elements: int, block_size: int) -> bool:
    """Return whether torchao quantizes the moments of a shard with so many elements."""
    return elements >= MIN_ELEMENTS and elements % block_size == 0


def check_shards(name: str, parameter: Tensor, block_size: int) -> None:
    """Refuse a sharding under which quantized moments cannot be saved.

    Raises:
        UserError: blocks would not be whole in every shard, or only some ranks would quantize.
    """
    dims, sizes = {*sharded_axes(parameter).values()}, local_sizes(parameter)
    are_quantized = {is_quantized_size(size, block_size) for size in sizes}
    advice = "Give it an [[optimizer.groups]] with another optimizer, or change the number of shards"
    what = f"{name} {[*parameter.shape]} cannot have quantized moments on {count_shards(parameter)} shards"
    if dims - {0} and True in are_quantized:
        raise UserError(f"{what}: it is sharded by dimension {max(dims)}, and blocks are parts of rows. {advice}")
    if len(are_quantized) > 1:
        raise UserError(
            f"{what}: shards have {min(sizes):,} to {max(sizes):,} elements, and torchao quantizes only those with at "
            f"least {MIN_ELEMENTS:,} elements in whole blocks of {block_size}. {advice}"
        )
    if len(sizes) > 1 and are_quantized == {True} and parameter.shape[1:].numel() % block_size:
        raise UserError(
            f"{what}: {parameter.shape[0]} rows do not divide evenly, and rows are not whole blocks of {block_size} "
            f"elements. {advice}"
        )
