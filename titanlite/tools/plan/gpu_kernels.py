"""Kernels of an NVIDIA GPU for fake tensors on the CPU. Without a CUDA build, only those can go through backward."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from titanlite.ops.cpu import CpuKernels
from titanlite.ops.cross_entropy import LabelSoftmax, SplitVocabulary, label_softmax_in_place, memory_of_gradient
from titanlite.ops.divergence import ChunkDivergence, divergence
from titanlite.ops.functions import Activation, weighted
from titanlite.ops.kernels import Kernels

EXPERT_SKEW = 1.1
"""Tokens that a rank receives for its experts, over an even share. The router's balance keeps the busiest rank near."""


MOST_OFFSET = 2**31 - 1
"""Largest offset in bytes that PyTorch's kernels count in 32 bits."""


class FakeCounts(Kernels):
    """Kernels that know how many tokens come from other ranks without reading a tensor."""

    def read_counts(
        self, to_R: Tensor, from_R: Tensor, copies: Tensor, *, tokens: int, experts: int, active: int
    ) -> tuple[list[int], list[int], int]:
        ranks = len(to_R)
        each = tokens * ranks_of_token(ranks, experts, active) / ranks
        return [round(each)] * ranks, [round(EXPERT_SKEW * each)] * ranks, round(EXPERT_SKEW * tokens * active)


def ranks_of_token(ranks: int, experts: int, active: int) -> float:
    """Return how many ranks have some of a token's experts, if all choices are equally likely."""
    elsewhere = math.comb(experts - experts // ranks, active) / math.comb(experts, active)
    return ranks * (1 - elsewhere)


class FakeCpuKernels(FakeCounts, CpuKernels):
    """Kernels of this machine's CPU for fake tensors."""


class GpuKernels(FakeCounts):
    """Kernels that make the planner trace on CPU tensors the operators that a GPU would run.

    Args:
        compiles: whether torch.compile is used.
    """

    def is_gpu(self, device: torch.device) -> bool:
        return True

    def weighted(self, activation: Activation, gate_SF: Tensor, up_SF: Tensor, weights_S: Tensor) -> Tensor:
        return weighted(activation, gate_SF, up_SF, weights_S)

    def label_softmax(
        self,
        logits_CV: Tensor,
        labels_C: Tensor,
        valid_C: Tensor,
        *,
        z_loss: float,
        dtype: torch.dtype | None,
        vocabulary: SplitVocabulary | None = None,
        out: Tensor | None = None,
    ) -> LabelSoftmax:
        if not self.compiles or dtype is None or vocabulary:
            return label_softmax_in_place(
                logits_CV, labels_C, valid_C, z_loss=z_loss, dtype=dtype, vocabulary=vocabulary, out=out
            )
        largest_C, sum_C, label_logit_C = softmax_sums(logits_CV, labels_C)
        d_logits_CV = memory_of_gradient(logits_CV, dtype, out)
        torch.mul(logits_CV, sum_C.unsqueeze(1), out=d_logits_CV)
        return LabelSoftmax(largest_C, sum_C, label_logit_C, d_logits_CV)

    def divergence(self, device: torch.device) -> Callable[..., ChunkDivergence]:
        return divergence

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float | None) -> Tensor:
        """Run one kernel that keeps its input and one number for each vector for backward, as PyTorch does on a GPU.

        In compiled blocks, the compiler generates a kernel of its own.
        """
        if torch.compiler.is_compiling() or weight.dtype != x.dtype:
            return super().rms_norm(x, weight, eps)
        return rms_norm(x, weight)[0]

    def has_packed_attention(self, device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
        is_half = dtype in (torch.bfloat16, torch.float16)
        return self.attention in ("auto", "flash") and is_half and head_dim % 8 == 0 and head_dim <= 256

    def has_float32_output(self, device: torch.device) -> bool:
        return True


def attention_scratch(func: Any, args: Any) -> int:
    """Return the bytes that flash attention allocates and frees within backward.

    They are the query's gradient in float32 and, with grouped queries, the gradients of keys and values for each query
    head. Their sum over a group needs a float32 buffer where offsets in bytes exceed 32 bits. Sources: `mha_bwd` in
    aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp, `gpu_reduce_kernel` in
    aten/src/ATen/native/cuda/Reduce.cuh.
    """
    if not str(func.overloadpacket).endswith("backward") or args[1].dtype == torch.float32:
        return 0
    query, key = args[1:3]
    groups = query.shape[1] // key.shape[1]
    each = groups * key.numel() * query.element_size() if groups > 1 else 0
    return query.numel() * 4 + 2 * each + (key.numel() * 4 if each > MOST_OFFSET else 0)


def _operator(function: Callable[..., Any]) -> Any:
    """Make an operator of a function that returns tensors of the right shapes; their values do not matter."""
    made = torch.library.custom_op(f"titanlite_plan::{function.__name__}", function, mutates_args=())
    made.register_fake(function)
    return made


@_operator
def softmax_sums(logits_CV: Tensor, labels_C: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Read the logits in one kernel."""
    largest_C, sum_C, label_logit_C = (logits_CV.new_empty(len(labels_C)) for _ in range(3))
    return largest_C, sum_C, label_logit_C


@_operator
def rms_norm(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), x.new_empty(x.shape[:-1], dtype=torch.float32)


@_operator
def rms_norm_backward(gradient: Tensor, x: Tensor, scale: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(weight)


def _save_for_backward(ctx: Any, inputs: tuple[Tensor, Tensor], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(inputs[0], output[1], inputs[1])


def _backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
    return rms_norm_backward(gradient, *ctx.saved_tensors)


rms_norm.register_autograd(_backward, setup_context=_save_for_backward)
