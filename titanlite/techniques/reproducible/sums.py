"""Sums whose bits do not depend on how a global batch is divided among ranks and micro-batches.

A sum of floating-point numbers depends on the order in which they are added. What a step computes for one micro-batch
does not depend on the layout, as long as its sequences are the same: training.local_batch_size neighbours in the global
batch. So sums over micro-batches have one order on every layout:

- Gradients are added in a binary tree over the number of the micro-batch in the global batch. The lowest bits of that
  number are the rank among those that shard parameters, then comes the number within the rank, then the replica.
  Gradients of one micro-batch are added over shards, then over micro-batches as a binary counter carries, and last over
  replicas.
- Losses and norms are added as integers, which is exact in any order.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor


def tree_sum(parts: Tensor) -> Tensor:
    """Add over the first dimension, whose size is a power of two: neighbours first, then neighbours of their sums."""
    while len(parts) > 1:
        parts = parts[0::2] + parts[1::2]
    return parts[0]


def add_in_tree(parts: Sequence[Tensor]) -> Tensor:
    """Return the `tree_sum` of tensors that are not parts of one, without a copy of them."""
    while len(parts) > 1:
        parts = [first + second for first, second in zip(parts[0::2], parts[1::2], strict=True)]
    return parts[0]


def copies(weight: Tensor, count: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Return this rank's part of a weight several times. Their gradients are added in the tree, in a dtype. A single
    copy is the weight, whose gradient FSDP converts."""
    if count == 1:
        return (weight,)
    if weight.requires_grad and weight.is_leaf:  # FSDP adds it over ranks as it is
        weight.grad_dtype = dtype  # pyright: ignore[reportAttributeAccessIssue]
    return _Copies.apply(weight, count, dtype)


class _Copies(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, count: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
        ctx.dtype = dtype
        ctx.place = (weight.device_mesh, weight.placements) if isinstance(weight, DTensor) else None
        part = weight.to_local() if isinstance(weight, DTensor) else weight
        return tuple(part.view_as(part) for _ in range(count))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        total = add_in_tree([gradient.to(ctx.dtype) for gradient in gradients])
        return DTensor.from_local(total, *ctx.place, run_check=False) if ctx.place else total, None, None


def tree_reduce_scatter(output: Tensor, parts: Tensor, group: dist.ProcessGroup, op: Any) -> None:
    """Reduce-scatter that adds over ranks in the tree, and does not average."""
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=group)
    output.copy_(tree_sum(received.view(group.size(), -1)))
