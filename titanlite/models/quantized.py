"""Frozen weights of linear layers in 8 bits: one code for each weight, and one float32 scale for each row.

A weight is its code times the scale of its row. Codes are int8, as torchao's weight-only quantization chooses them: at
8 bits they have a quarter of float8's error. Codes and scales are plain parameters, `<layer>.weight` [out, in] and
`<layer>.weight_scale` [out]. So they are sharded by rows and saved like any others. A row is quantized by itself, so it
has the same bits on any layout.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

LARGEST = 127.5
"""Number to which the largest weight of a row is scaled."""
SCALE = "weight_scale"


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return (codes, scales [rows]) of a weight [rows, in], or of some of its rows."""
    weight = weight.float()
    smallest = torch.finfo(torch.float32).tiny  # for rows of zeros
    scale = (weight.abs().amax(dim=1) / LARGEST).clamp_(min=smallest)
    return (weight * (1 / scale).unsqueeze(1)).round_().clamp_(-128, 127).to(torch.int8), scale


def dequantize(codes: Tensor, scale: Tensor) -> Tensor:
    """Return the weight in float32."""
    return codes.float().mul_(scale.float().unsqueeze(1))


def scales_of(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the name of the scales for the name of each quantized weight among parameters or other tensors."""
    scales = {name: name.removesuffix("weight") + SCALE for name, it in tensors.items() if it.dtype == torch.int8}
    return {name: scale for name, scale in scales.items() if scale in tensors}


def quantized_parameters(model: torch.nn.Module) -> set[torch.nn.Parameter]:
    """Return the codes and scales of a model."""
    parameters = dict(model.named_parameters())
    return {parameters[name] for pair in scales_of(parameters).items() for name in pair}


class QuantizedLinear(torch.autograd.Function):
    """x @ weight^T with a quantized weight, which gets no gradient.

    Rows of the weight are columns of the output, so the scale multiplies the output and codes are not rounded: each is
    exact in bfloat16. Codes are converted again in backward. To keep the converted ones would take the memory of an
    unsharded model.

    Args:
        x: [..., in].
        wide: compute dtype of the matmul.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, codes: Tensor, scale: Tensor, wide: torch.dtype) -> Tensor:
        ctx.save_for_backward(codes, scale)
        ctx.wide, ctx.dtype = wide, x.dtype
        out = F.linear(x.to(wide), codes.to(wide))  # activation checkpointing may keep it: it must not change
        return torch.mul(out, scale, out=torch.empty_like(out)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        codes, scale = ctx.saved_tensors
        scaled = gradients[0].to(ctx.wide, copy=True).mul_(scale)
        # Another operator than that of forward: the compiler would take both for one, and keep what it returns.
        converted = codes.t().to(ctx.wide).t()
        return (scaled @ converted).to(ctx.dtype), None, None, None
