"""Grouped matmul for devices without a kernel for it: one matmul after the other."""

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula


def loop_over_groups(x_TD: Tensor, weights_EDF: Tensor, ends_E: Tensor, dtype: torch.dtype) -> Tensor:
    """Matmul of each group of tokens with its own weight -> [T, F], one group after the other.

    The loop waits for the device to read the sizes of the groups.

    Args:
        ends_E: int32. Group e holds the tokens from ends_E[e - 1] to ends_E[e]; the last end is T.
        dtype: compute dtype of the operands.
    """
    return _grouped_mm(x_TD, weights_EDF, ends_E, dtype)


# These are custom operators, so that the compiler and fake tensors need not know the sizes of the groups.


@torch.library.custom_op("titanlite::grouped_mm", mutates_args=())
def _grouped_mm(x_TD: Tensor, weights_EDF: Tensor, ends_E: Tensor, dtype: torch.dtype) -> Tensor:
    out_TF = x_TD.new_empty(len(x_TD), weights_EDF.shape[2])
    for (begin, end), weight_DF in zip(_groups(ends_E), weights_EDF, strict=True):
        out_TF[begin:end] = torch.mm(x_TD[begin:end].to(dtype), weight_DF.to(dtype))
    return out_TF


@torch.library.custom_op("titanlite::grouped_mm_weights", mutates_args=())
def _weight_gradient(x_TD: Tensor, gradient_TF: Tensor, ends_E: Tensor, dtype: torch.dtype) -> Tensor:
    out_EDF = x_TD.new_empty(len(ends_E), x_TD.shape[1], gradient_TF.shape[1])
    for (begin, end), out_DF in zip(_groups(ends_E), out_EDF, strict=True):
        out_DF.copy_(torch.mm(x_TD[begin:end].t().to(dtype), gradient_TF[begin:end].to(dtype)))
    return out_EDF


def _groups(ends_E: Tensor) -> list[tuple[int, int]]:
    ends = ends_E.tolist()
    return list(zip([0, *ends], ends, strict=False))


@_grouped_mm.register_fake
def _(x_TD: Tensor, weights_EDF: Tensor, ends_E: Tensor, dtype: torch.dtype) -> Tensor:
    return x_TD.new_empty(len(x_TD), weights_EDF.shape[2])


@_weight_gradient.register_fake
def _(x_TD: Tensor, gradient_TF: Tensor, ends_E: Tensor, dtype: torch.dtype) -> Tensor:
    return x_TD.new_empty(len(ends_E), x_TD.shape[1], gradient_TF.shape[1])


def _save_inputs(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, torch.dtype], output: Tensor) -> None:
    *tensors, ctx.dtype = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, gradient_TF: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
    x_TD, weights_EDF, ends_E = ctx.saved_tensors
    gradient_TF = gradient_TF.contiguous()
    x_needs, weights_need, *_ = ctx.needs_input_grad
    d_x_TD = _grouped_mm(gradient_TF, weights_EDF.transpose(1, 2), ends_E, ctx.dtype) if x_needs else None
    return d_x_TD, _weight_gradient(x_TD, gradient_TF, ends_E, ctx.dtype) if weights_need else None, None, None


_grouped_mm.register_autograd(_backward, setup_context=_save_inputs)


@register_flop_formula(torch.ops.titanlite.grouped_mm)
def _flops(x_shape: Any, weights_shape: Any, ends_shape: Any, *_: Any, **__: Any) -> int:
    return 2 * x_shape[0] * x_shape[1] * weights_shape[2]


@register_flop_formula(torch.ops.titanlite.grouped_mm_weights)
def _flops_of_weights(x_shape: Any, gradient_shape: Any, ends_shape: Any, *_: Any, **__: Any) -> int:
    return 2 * x_shape[0] * x_shape[1] * gradient_shape[1]
