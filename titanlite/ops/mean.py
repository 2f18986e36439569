"""Means of weights in float64, rounded once."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor


def weighted_mean(tensors: Iterable[Tensor], weights: Sequence[float]) -> Tensor:
    """Return the weighted mean of tensors, in float64. One is in memory at a time, where they are made one by one."""
    first, *others = weights
    tensors = iter(tensors)
    total = next(tensors).double().mul_(first)
    for tensor, weight in zip(tensors, others, strict=True):
        total.add_(tensor, alpha=weight)
    return total.div_(sum(weights))


def rounded_once(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return float64 values in another dtype, each rounded to the nearest, ties to even.

    PyTorch converts float64 to narrow dtypes by way of float32, which rounds twice. So float32 is rounded to odd here,
    from which the second rounding is right.
    """
    if dtype.itemsize >= 4:
        return values.to(dtype)
    near = values.float()
    bits = near.view(torch.int32)
    bits -= (near.double().abs() > values.abs()).int()  # towards zero
    bits |= (near.double() != values).int()
    return near.to(dtype)
