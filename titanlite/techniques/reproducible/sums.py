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

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from titanlite.mesh import replica_group, world_group
from titanlite.runtime.private_torch.tensors import local_tensor
from titanlite.step import Gradients

BITS = 34
"""Bits of a summand as an integer, of those that the largest summand has. 2^28 of them can be added in an int64."""

BUCKET = 2**26
"""Elements of gradients that are added over replicas together."""

ROWS = 1024
"""Rows of a gradient whose norms are computed together on GPUs."""


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


def _add_in_place(total: dict[nn.Parameter, Tensor], other: dict[nn.Parameter, Tensor]) -> None:
    both = [parameter for parameter in total if parameter in other]
    torch._foreach_add_(
        [local_tensor(total[parameter]) for parameter in both], [local_tensor(other[parameter]) for parameter in both]
    )
    total |= {parameter: gradient for parameter, gradient in other.items() if parameter not in total}


def _add_over_replicas(gradients: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Add gradients over ranks in the tree, in place, `BUCKET` elements or one gradient at a time."""
    buckets: list[list[Tensor]] = []
    size = 0
    for gradient in gradients:
        size += gradient.numel()
        if not buckets or size > BUCKET or gradient.dtype != buckets[-1][-1].dtype:
            buckets.append([])
            size = gradient.numel()
        buckets[-1].append(gradient)
    for bucket in buckets:
        total = _add_over(torch.cat([gradient.flatten() for gradient in bucket]), group)
        for gradient, part in zip(bucket, total.split([gradient.numel() for gradient in bucket]), strict=True):
            gradient.copy_(part.view_as(gradient))


def _add_over(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Add a tensor of one dimension over ranks in the tree. Each rank adds a slice, so that it sends the bytes of a
    reduce-scatter and of an all-gather."""
    ranks = group.size()
    padded = nn.functional.pad(part, (0, -len(part) % ranks))
    parts = torch.empty_like(padded)
    dist.all_to_all_single(parts, padded, group=group)
    gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # its name since torch 2.13
    gather(padded, tree_sum(parts.view(ranks, -1)).contiguous(), group=group)
    return padded[: len(part)]


def exact_sums(parts: Sequence[Tensor], group: dist.ProcessGroup) -> list[Tensor]:
    """Add the elements of each part over all ranks -> float64 scalars, rounded to 2^-34 of the largest element.

    The result does not depend on which rank has which element, since elements are added as integers. It is infinite
    where an element is not finite.

    Args:
        parts: as many on each rank, of any lengths; on one device.
    """
    largest = torch.stack([part.abs().max() if part.numel() else part.new_zeros(()) for part in parts]).double()
    largest = largest.nan_to_num(nan=torch.inf, posinf=torch.inf)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    shift = BITS - torch.frexp(largest.nan_to_num(posinf=0.0)).exponent
    scaled = [torch.ldexp(part.double().nan_to_num(0.0, 0.0, 0.0), n) for part, n in zip(parts, shift, strict=True)]
    total = torch.stack([part.round().long().sum() for part in scaled])
    dist.all_reduce(total, group=group)
    return [*torch.where(largest.isfinite(), torch.ldexp(total.double(), -shift), torch.inf)]


class ExactSums(Gradients):
    """Gradients that are added in the tree, with a loss and a norm that do not depend on the layout.

    Args:
        parameters: those that are trained, on shards that `tree_reduce_scatter` adds.
    """

    def __init__(self, mesh: DeviceMesh, parameters: Iterable[nn.Parameter]) -> None:
        self._replicas, self._world = replica_group(mesh), world_group(mesh)
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._partial: list[dict[nn.Parameter, Tensor]] = []
        """Sums of 2^k micro-batches, for each bit k of their number in this step, the largest first."""

    def partial_sums(self, micro_batches: int) -> int:
        return (micro_batches - 1).bit_count()

    def collect(self, micro_batch: int, *, is_last: bool) -> None:
        if micro_batch == 0:
            self._partial.clear()  # a step before may have raised
        total = {parameter: parameter.grad for parameter in self._parameters if parameter.grad is not None}
        while micro_batch & 1:
            _add_in_place(total, self._partial.pop())
            micro_batch >>= 1
        if not is_last:
            self._partial.append(total)
        elif self._replicas is not None:
            _add_over_replicas([local_tensor(gradient) for gradient in total.values()], self._replicas)
        for parameter, gradient in total.items():
            parameter.grad = gradient if is_last else None

    def scale(self, valid_tokens: Tensor, *, ranks: int, micro_batches: int) -> Tensor:
        return 1 / valid_tokens

    def exact_sums(self, of_tokens: Sequence[Tensor], gradients: Sequence[Tensor]) -> list[Tensor]:
        *sums, square = exact_sums([*of_tokens, squares(gradients).to(of_tokens[0].device)], self._world)
        return [value.float() for value in (*sums, square / (self._replicas.size() if self._replicas else 1))]


def squares(gradients: Iterable[Tensor]) -> Tensor:
    """Return the squared norm of each row of gradients, and the square of each element of those of one dimension,
    as float64 [N]. A row has the same bits whatever part of the gradient is here."""
    norms = [_row_norms(gradient) if gradient.dim() > 1 else gradient.abs() for gradient in gradients]
    return torch.cat([norm.flatten().double() for norm in norms]).square()


def _row_norms(gradient: Tensor) -> Tensor:
    """Return float32 norms over the last dimension."""
    rows = gradient.flatten(0, -2)
    norm = partial(torch.linalg.vector_norm, dim=-1, dtype=torch.float32)
    if gradient.device.type == "cpu":
        return norm(rows)
    # Kernels of GPUs choose the order of a row's sum by the number of rows, so that they get as many each time.
    *full, last = rows.split(ROWS)
    padded = nn.functional.pad(last, (0, 0, 0, ROWS - len(last)))
    return torch.cat([*map(norm, full), norm(padded)[: len(last)]])
