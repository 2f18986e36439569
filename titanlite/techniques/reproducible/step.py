"""The step whose sums do not depend on the layout; `sums.py` says how gradients are added.

Losses and norms are added as integers, which is exact in any order.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from titanlite.loss import TokenLoss
from titanlite.mesh import replica_group
from titanlite.runtime.private_torch.tensors import local_tensor
from titanlite.step import Step
from titanlite.techniques.reproducible import sums

BITS = 34
"""Bits of a summand as an integer, of those that the largest summand has. 2^28 of them can be added in an int64."""

BUCKET = 2**26
"""Elements of gradients that are added over replicas together."""

ROWS = 1024
"""Rows of a gradient whose norms are computed together on GPUs."""


@dataclass(kw_only=True, eq=False)
class ReproducibleStep(Step):
    """Step whose gradients are added in the tree, with a loss and a norm that do not depend on the layout.

    FSDP adds gradients over shards by `tree_reduce_scatter`.
    """

    def __post_init__(self, state: Mapping[str, Any]) -> None:
        super().__post_init__(state)
        # CPU kernels divide sums among threads, and processes divide a machine's cores: by default the number of
        # threads follows from the layout.
        torch.set_num_threads(1)
        self._replica_group = replica_group(self.mesh)
        self._parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self._partial: list[dict[nn.Parameter, Tensor]] = []
        """Sums of 2^k micro-batches, for each bit k of their number in this step, the largest first."""

    def partial_sums(self, micro_batches: int) -> int:
        return (micro_batches - 1).bit_count()

    def after_backward(self, micro_batch: int, *, is_last: bool) -> None:
        if micro_batch == 0:
            self._partial.clear()  # a step before may have raised
        total = {parameter: parameter.grad for parameter in self._parameters if parameter.grad is not None}
        while micro_batch & 1:
            _add_in_place(total, self._partial.pop())
            micro_batch >>= 1
        if not is_last:
            self._partial.append(total)
        elif self._replica_group is not None:
            _add_over_replicas([local_tensor(gradient) for gradient in total.values()], self._replica_group)
        for parameter, gradient in total.items():
            parameter.grad = gradient if is_last else None

    def loss_factor(self, valid_tokens: Tensor, *, micro_batches: int) -> Tensor:
        return 1 / valid_tokens

    def sum_over_ranks(
        self, losses: TokenLoss, square: Tensor, flags: Tensor, gradients: Sequence[Tensor]
    ) -> tuple[TokenLoss, Tensor, Tensor]:
        _, _, flags = super().sum_over_ranks(losses, square, flags, gradients)
        values = [losses.total, losses.cross_entropy, *losses.metrics.values()]
        *sums, square = exact_sums([*values, squares(gradients).to(losses.total.device)], self.world)
        replicas = self._replica_group.size() if self._replica_group else 1
        total, cross_entropy, *metrics = (value.float() for value in sums)
        exact = TokenLoss(total, cross_entropy, dict(zip(losses.metrics, metrics, strict=True)))
        return exact, (square / replicas).float(), flags


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
    gather(padded, sums.tree_sum(parts.view(ranks, -1)).contiguous(), group=group)
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
