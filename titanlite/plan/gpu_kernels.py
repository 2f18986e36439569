"""Fake tensors say that they are on the CPU, also when a GPU is planned for: without a CUDA build, nothing else can go
through backward. What the code does otherwise on a GPU is listed here, and put in its place.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

PRODUCTS = ("loss", "models.layers", "models.grouped")


@contextmanager
def as_on_gpu(*, fused_norm: bool) -> Iterator[None]:
    """Within, what is traced is what an NVIDIA GPU would do.

    Args:
        fused_norm: RMSNorm has a kernel there, that keeps its input and one number a row for backward. Without the
            compiler: that makes one of its own.
    """
    with ExitStack() as stack:
        # Products take operands of the compute type, and not float32.
        for name in ("loss.logits_operand_dtype", *(f"{user}.matmul_dtype" for user in PRODUCTS)):
            stack.enter_context(patch(f"titanlite.{name}", lambda x: x.dtype))
        stack.enter_context(patch("titanlite.loss.gives_float32", lambda device: True))
        stack.enter_context(patch("titanlite.models.layers.has_norm_kernel", lambda device: True))
        # Documents are packed, without a mask.
        stack.enter_context(patch("titanlite.models.layers.has_packed_kernel", _has_packed_kernel))
        # NCCL's own collectives are as they should be.
        stack.enter_context(patch("titanlite.parallelize.fsdp.suit_gloo", lambda units, **_: None))
        if fused_norm:
            stack.enter_context(patch("torch.nn.functional.rms_norm", _rms_norm))
        yield


def _has_packed_kernel(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    return dtype == torch.bfloat16 and head_dim % 8 == 0 and head_dim <= 256


def _rms_norm(x: Tensor, shape: Any, weight: Tensor, eps: float | None = None) -> Tensor:
    return torch.ops.titanlite_plan.rms_norm(x, weight)[0]


@torch.library.custom_op("titanlite_plan::rms_norm", mutates_args=())
def _fused(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Shapes only."""
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


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(inputs[0], output[1], inputs[1])


def _backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
    x, scale, weight = ctx.saved_tensors
    d_x, d_weight = _fused_backward(gradient, x, scale, weight)
    return d_x, d_weight


_fused.register_autograd(_backward, setup_context=_keep)
