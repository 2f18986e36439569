"""Collectives that the compiler can trace: PyTorch's functional ones. Their results are new tensors."""

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives
from torch import Tensor


def gather_with_gradient(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All-gather tensors along dim 0, in the order of ranks. Backward reduce-scatters the sum of the gradients."""
    return _Gather.apply(x, group.size(), group.group_name)


class _Gather(torch.autograd.Function):
    """PyTorch's own gradient of the operator differs between releases, so that this one is used in all."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, size: int, name: str) -> Tensor:
        ctx.group = size, name
        gathered = torch.ops._c10d_functional.all_gather_into_tensor(x.contiguous(), size, name)
        return torch.ops._c10d_functional.wait_tensor(gathered)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        total = torch.ops._c10d_functional.reduce_scatter_tensor(gradients[0].contiguous(), "sum", *ctx.group)
        return torch.ops._c10d_functional.wait_tensor(total), None, None


def exchange_rows(x: Tensor, to_others: list[int], from_others: list[int], group: dist.ProcessGroup) -> Tensor:
    """Send rows to each rank, and return the rows from each, both in the order of ranks.

    Args:
        to_others: numbers of rows to each rank; their sum is len(x).
        from_others: numbers of rows from each rank.
    """
    received = torch.ops._c10d_functional.all_to_all_single(x.contiguous(), from_others, to_others, group.group_name)
    return torch.ops._c10d_functional.wait_tensor(received)


def exchange_with_gradient(x: Tensor, to_others: list[int], from_others: list[int], group: dist.ProcessGroup) -> Tensor:
    """`exchange_rows`, whose backward sends gradients back."""
    return _Exchange.apply(x, to_others, from_others, group)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, to_others: list[int], from_others: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.back = from_others, to_others, group
        return exchange_rows(x, to_others, from_others, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return exchange_rows(gradients[0], *ctx.back), None, None, None
