"""Norms of gradients, part by part."""

from collections.abc import Sequence

import torch
from torch import Tensor


def norms_of(gradients: Sequence[Tensor]) -> list[Tensor]:
    """L2 norms, accurate to float32: of each tensor, or of each of its rows. They do not depend on what else is asked
    for.

    On CPUs PyTorch's norm adds the squares of a tensor one after the other: of a million elements four digits are left,
    and clipping would depend on how tensors are sharded. So there it is taken row by row.
    """
    if gradients[0].device.type == "cpu":
        return [torch.linalg.vector_norm(gradient, dim=-1, dtype=torch.float32) for gradient in gradients]
    return [*torch._foreach_norm(list(gradients), dtype=torch.float32)]
