"""Kernels of an NVIDIA GPU for fake tensors on the CPU. Without a CUDA build, only those can go through backward."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from titanlite.kernels import Kernels


class GpuKernels(Kernels):
    """Kernels that make the planner trace on CPU tensors the operators that a GPU would run.

    Args:
        fused_norm: RMSNorm is one kernel that keeps its input and one number for each vector for backward. Without the
            compiler only: the compiler generates a kernel of its own.
    """

    def __init__(self, *, fused_norm: bool) -> None:
        self.fused_norm = fused_norm

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float | None) -> Tensor:
        if not self.fused_norm:
            return F.rms_norm(x, weight.shape, weight, eps)
        return torch.ops.titanlite_plan.rms_norm(x, weight)[0]

    def has_packed_attention(self, device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
        return dtype == torch.bfloat16 and head_dim % 8 == 0 and head_dim <= 256

    def logits_dtype(self, hidden_TD: Tensor) -> torch.dtype:
        return hidden_TD.dtype

    def has_float32_output(self, device: torch.device) -> bool:
        return True


@torch.library.custom_op("titanlite_plan::rms_norm", mutates_args=())
def _fused(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return tensors of the right shapes; their values do not matter."""
    return torch.empty_like(x), x.new_empty(x.shape[:-1], dtype=torch.float32)


@torch.library.custom_op("titanlite_plan::rms_norm_backward", mutates_args=())
def _fused_backward(gradient: Tensor, x: Tensor, scale: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(weight)


@_fused.register_fake
def _(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), x.new_empty(x.shape[:-1], dtype=torch.float32)


@_fused_backward.register_fake
def _(gradient: Tensor, x: Tensor, scale: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(weight)


def _save_for_backward(ctx: Any, inputs: tuple[Tensor, Tensor], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(inputs[0], output[1], inputs[1])


def _backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
    x, scale, weight = ctx.saved_tensors
    d_x, d_weight = _fused_backward(gradient, x, scale, weight)
    return d_x, d_weight


_fused.register_autograd(_backward, setup_context=_save_for_backward)
