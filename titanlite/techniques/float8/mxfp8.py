"""Linear layers with MXFP8 matmuls (arXiv:2310.10537): values in float8, of which each 32 along the summed dimension
have one scale, a power of two.

Weights are plain parameters. A part of a layer that is whole blocks rounds its values as the whole layer does.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchao.prototype.moe_training.mxfp8_linear import (
    KernelPreference,
    MXFP8Dim0CastKernelChoice,
    MXFP8Dim1CastKernelChoice,
    ScaleCalculationMode,
    mx_mm,
)

from titanlite.models.layers import Linear

BLOCK = 32
"""Values with one scale."""


class Mxfp8Linear(Linear):
    """Linear layer whose three matmuls round their operands to MXFP8. The weight's gradient sums over tokens."""

    emulate: bool

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, -2).contiguous()
        if missing := -len(tokens) % BLOCK:
            tokens = F.pad(tokens, (0, 0, 0, missing))  # zeros change no scale
        out = mx_mm.apply(
            tokens,
            self.weight,
            *[torch.float8_e4m3fn] * 3,
            BLOCK,
            KernelPreference.EMULATED if self.emulate else KernelPreference.AUTO,
            # torchao's choice, and plain operators where its kernels do not run, as on the planner's fake CPU tensors
            MXFP8Dim0CastKernelChoice.TRITON if x.is_cuda else MXFP8Dim0CastKernelChoice.TORCH,
            MXFP8Dim1CastKernelChoice.CUDA if x.is_cuda else MXFP8Dim1CastKernelChoice.TORCH,
            ScaleCalculationMode.RCEIL,
            False,
        )
        out = out[: x.shape[:-1].numel()].unflatten(0, x.shape[:-1])
        return self.add_bias(out if self.sum_over_ranks is None else self.sum_over_ranks(out))


def mxfp8_linear(linear: nn.Linear, *, emulate: bool) -> Mxfp8Linear:
    """Return a layer with the parameters of a linear layer."""
    with torch.device("meta"):
        new = Mxfp8Linear(linear.in_features, linear.out_features)
    new.weight, new.bias, new.emulate = linear.weight, linear.bias, emulate
    return new
