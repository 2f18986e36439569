"""Norms of gradients, one for each tensor, and their memory as few tensors."""

from collections.abc import Sequence

import torch
from torch import Tensor

from titanlite.runtime.private_torch.operators import foreach_norms
from titanlite.runtime.private_torch.tensors import storage_key


def gradient_norms(gradients: Sequence[Tensor]) -> list[Tensor]:
    """Return L2 norms in float32: one of each tensor, on CPUs one of each of its rows.

    The norm of a tensor does not depend on which others are in the list.

    PyTorch's CPU kernel adds all squares one after the other. After a million elements four digits are left, and
    clipping would depend on the layout. The sums of single rows stay accurate.
    """
    if gradients[0].device.type == "cpu":
        return [torch.linalg.vector_norm(gradient, dim=-1, dtype=torch.float32) for gradient in gradients]
    return foreach_norms(gradients, dtype=torch.float32)


def joined(gradients: Sequence[Tensor]) -> list[Tensor]:
    """Return the memory of gradients as few tensors of one dimension.

    FSDP reduces the gradients of a unit into one tensor. Contiguous gradients that follow each other there are joined.
    """
    runs: list[list[Tensor]] = []
    for gradient in gradients:
        if runs and _follows(gradient, runs[-1][-1]):
            runs[-1].append(gradient)
        else:
            runs.append([gradient])
    return [run[0].as_strided((sum(it.numel() for it in run),), (1,)) if len(run) > 1 else run[0] for run in runs]


def _follows(tensor: Tensor, other: Tensor) -> bool:
    """Return whether a tensor begins in the same storage where another one ends, both contiguous."""
    return (
        storage_key(tensor.untyped_storage()) == storage_key(other.untyped_storage())
        and tensor.dtype == other.dtype
        and tensor.storage_offset() == other.storage_offset() + other.numel()
        and tensor.is_contiguous()
        and other.is_contiguous()
    )
