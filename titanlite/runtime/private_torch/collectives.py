"""Collectives that the compiler can trace: PyTorch's functional ones. Their results are new tensors, without gradients.

PyTorch's own gradients of these operators differ between releases, so that callers define theirs.
"""

from typing import Literal

import torch
import torch.distributed._functional_collectives
from torch import Tensor


def all_gather(x: Tensor, size: int, name: str) -> Tensor:
    """Return the tensors of all ranks along dim 0, in the order of ranks.

    Args:
        size, name: of the process group.
    """
    gathered = torch.ops._c10d_functional.all_gather_into_tensor(x.contiguous(), size, name)
    return torch.ops._c10d_functional.wait_tensor(gathered)


def reduce_scatter(x: Tensor, size: int, name: str) -> Tensor:
    """Sum tensors over all ranks, and return this rank's part of dim 0; arguments as of `all_gather`."""
    total = torch.ops._c10d_functional.reduce_scatter_tensor(x.contiguous(), "sum", size, name)
    return torch.ops._c10d_functional.wait_tensor(total)


def all_reduce(x: Tensor, operation: Literal["sum", "max"], name: str) -> Tensor:
    """Return the sums, or the largest values, of the tensors of all ranks of the process group `name`."""
    reduced = torch.ops._c10d_functional.all_reduce(x.contiguous(), operation, name)
    return torch.ops._c10d_functional.wait_tensor(reduced)


def exchange_rows(x: Tensor, to_others: list[int], from_others: list[int], name: str) -> Tensor:
    """Send rows to each rank, and return the rows from each, both in the order of ranks.

    Args:
        to_others: numbers of rows to each rank; their sum is len(x).
        from_others: numbers of rows from each rank.
        name: of the process group.
    """
    received = torch.ops._c10d_functional.all_to_all_single(x.contiguous(), from_others, to_others, name)
    return torch.ops._c10d_functional.wait_tensor(received)
