"""Norms of gradients, one for each tensor."""

from collections.abc import Sequence

import torch
from torch import Tensor

from titanlite.runtime.private_torch import foreach_norms


def gradient_norms(gradients: Sequence[Tensor]) -> list[Tensor]:
    """Return L2 norms in float32: one of each tensor, on CPUs one of each of its rows.

    The norm of a tensor does not depend on which others are in the list.

    PyTorch's CPU kernel adds all squares one after the other. After a million elements four digits are left, and
    clipping would depend on the layout. The sums of single rows stay accurate.
    """
    if gradients[0].device.type == "cpu":
        return [torch.linalg.vector_norm(gradient, dim=-1, dtype=torch.float32) for gradient in gradients]
    return foreach_norms(gradients, dtype=torch.float32)
