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
