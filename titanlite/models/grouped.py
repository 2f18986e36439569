"""A matrix product for each group of rows, as experts need it, with one name for all devices."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.flop_counter import register_flop_formula

from titanlite.models.layers import matmul_dtype


def grouped_mm(x_TD: Tensor, weights_EDF: Tensor, ends_E: Tensor) -> Tensor:
    """Rows ends_E[e - 1] to ends_E[e] of x times weights_EDF[e]: [T, F]. ends_E is int32, and its last is T.

    torch's own kernel where there is one (NVIDIA GPUs, bfloat16, dims that 8 divides; also on their fake tensors).
    Elsewhere one product after the other, which waits for the device to tell the group's sizes.
    """
    is_aligned = x_TD.shape[1] % 8 == 0 and weights_EDF.shape[2] % 8 == 0  # rows of 16 bytes
    if x_TD.is_cuda and x_TD.dtype == torch.bfloat16 and is_aligned:
        return F.grouped_mm(x_TD, weights_EDF, offs=ends_E)
    return _one_by_one(x_TD, weights_EDF, ends_E)


# Ops of their own, so that the compiler and fake tensors need not know the sizes of the groups.


@torch.library.custom_op("titanlite::grouped_mm", mutates_args=())
def _one_by_one(x_TD: Tensor, weights_EDF: Tensor, ends_E: Tensor) -> Tensor:
    out_TF, wide = x_TD.new_empty(len(x_TD), weights_EDF.shape[2]), matmul_dtype(x_TD)
    for (begin, end), weight_DF in zip(_groups(ends_E), weights_EDF, strict=True):
        out_TF[begin:end] = torch.mm(x_TD[begin:end].to(wide), weight_DF.to(wide))
    return out_TF


@torch.library.custom_op("titanlite::grouped_mm_weights", mutates_args=())
def _gradient_of_weights(x_TD: Tensor, gradient_TF: Tensor, ends_E: Tensor) -> Tensor:
    out_EDF, wide = x_TD.new_empty(len(ends_E), x_TD.shape[1], gradient_TF.shape[1]), matmul_dtype(x_TD)
    for (begin, end), out_DF in zip(_groups(ends_E), out_EDF, strict=True):
        out_DF.copy_(torch.mm(x_TD[begin:end].t().to(wide), gradient_TF[begin:end].to(wide)))
    return out_EDF


def _groups(ends_E: Tensor) -> list[tuple[int, int]]:
    ends = ends_E.tolist()
    return list(zip([0, *ends], ends, strict=False))


@_one_by_one.register_fake
def _(x_TD: Tensor, weights_EDF: Tensor, ends_E: Tensor) -> Tensor:
    return x_TD.new_empty(len(x_TD), weights_EDF.shape[2])


@_gradient_of_weights.register_fake
def _(x_TD: Tensor, gradient_TF: Tensor, ends_E: Tensor) -> Tensor:
    return x_TD.new_empty(len(ends_E), x_TD.shape[1], gradient_TF.shape[1])


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, gradient_TF: Tensor) -> tuple[Tensor, Tensor, None]:
    x_TD, weights_EDF, ends_E = ctx.saved_tensors
    gradient_TF = gradient_TF.contiguous()
    d_x_TD = _one_by_one(gradient_TF, weights_EDF.transpose(1, 2), ends_E)
    return d_x_TD, _gradient_of_weights(x_TD, gradient_TF, ends_E), None


_one_by_one.register_autograd(_backward, setup_context=_keep)


@register_flop_formula(torch.ops.titanlite.grouped_mm)
def _flops(x_shape: Any, weights_shape: Any, ends_shape: Any, **_: Any) -> int:
    return 2 * x_shape[0] * x_shape[1] * weights_shape[2]


@register_flop_formula(torch.ops.titanlite.grouped_mm_weights)
def _flops_of_weights(x_shape: Any, gradient_shape: Any, ends_shape: Any, **_: Any) -> int:
    return 2 * x_shape[0] * x_shape[1] * gradient_shape[1]
