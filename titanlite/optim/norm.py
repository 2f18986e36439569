"""Norms of gradients, one for each tensor; their sums over ranks; and the memory of gradients as few tensors."""

from collections.abc import Mapping, Sequence
from functools import reduce

import torch
from torch import Tensor, nn

from titanlite.runtime.dtensor import count_replicas
from titanlite.runtime.private_torch.tensors import foreach_norms, storage_key


def gradient_norms(gradients: Sequence[Tensor]) -> list[Tensor]:
    """Return L2 norms in float32: one of each tensor, on CPUs one of each of its rows.

    The norm of a tensor does not depend on which others are in the list.

    PyTorch's CPU kernel adds all squares one after the other. After a million elements four digits are left, and
    clipping would depend on the layout. The sums of single rows stay accurate.
    """
    if gradients[0].device.type == "cpu":
        return [torch.linalg.vector_norm(gradient, dim=-1, dtype=torch.float32) for gradient in gradients]
    return foreach_norms(gradients, dtype=torch.float32)


def count_parameter_replicas(model: nn.Module, ranks: int) -> dict[nn.Parameter, int]:
    """Return how many of the ranks that hold a part of a parameter hold the same one, for each parameter."""
    return {parameter: count_replicas(parameter, ranks) for parameter in model.parameters()}


def sums_of_squares(
    norms: Mapping[nn.Parameter, Tensor], replicas: Mapping[nn.Parameter, int]
) -> tuple[Tensor, Tensor]:
    """Return the sum of squares of this rank's gradients, and its share of the global sum.

    Each element of the global sum is on `replicas` ranks, which share it evenly. Both are accurate to float32.
    """
    by_replicas: dict[int, list[Tensor]] = {}
    for parameter, norm in norms.items():
        by_replicas.setdefault(replicas[parameter], []).append(norm.flatten())
    squares = {count: torch.cat(parts).square().sum() for count, parts in by_replicas.items()}
    shares = [square / count for count, square in squares.items()]
    return reduce(torch.add, squares.values()), reduce(torch.add, shares)


def flat_views(gradients: Sequence[Tensor]) -> list[Tensor]:
    """Return the gradients as views of their memory, as few as possible.

    FSDP reduces the gradients of a unit into one tensor. Contiguous gradients that follow each other there become one.
    """
    runs: list[list[Tensor]] = []
    for gradient in gradients:
        if runs and _follows(gradient, runs[-1][-1]):
            runs[-1].append(gradient)
        else:
            runs.append([gradient])
    return [
        run[0].as_strided((sum(tensor.numel() for tensor in run),), (1,)) if len(run) > 1 else run[0] for run in runs
    ]


def _follows(tensor: Tensor, other: Tensor) -> bool:
    """Return whether a tensor begins in the same storage where another one ends, both contiguous."""
    return (
        storage_key(tensor.untyped_storage()) == storage_key(other.untyped_storage())
        and tensor.dtype == other.dtype
        and tensor.storage_offset() == other.storage_offset() + other.numel()
        and tensor.is_contiguous()
        and other.is_contiguous()
    )
