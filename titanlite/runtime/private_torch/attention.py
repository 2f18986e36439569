"""Attention with the log-sum-exp of each query's scores as a second result, and backward passes that take it.

PyTorch's public functions return it for packed documents only, and have no backward pass that one can call.

Shape suffixes: see `models/layers.py`; S keys.
"""

from typing import Any

import torch
from torch import Tensor

Gradients = tuple[Tensor, Tensor, Tensor]
"""Gradients of queries, keys and values."""


def cpu_attention(
    q_BNLH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor, *, mask: Tensor | None, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Compute attention on a CPU -> (output [B, N, L, H], log-sum-exp [B, N, L]). Query heads can share key heads.

    Args:
        mask: is added to the scores. None: causal.
        scale: of the scores. None: 1 / sqrt(H).
    """
    operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return operator(q_BNLH, k_BKSH, v_BKSH, 0.0, mask is None, attn_mask=mask, scale=scale)


def cpu_attention_backward(
    gradient: Tensor,
    q_BNLH: Tensor,
    k_BKSH: Tensor,
    v_BKSH: Tensor,
    out_BNLH: Tensor,
    lse_BNL: Tensor,
    *,
    mask: Tensor | None,
    scale: float | None,
) -> Gradients:
    """Return the gradients of `cpu_attention`, whose weights are exp(score - lse)."""
    operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    tensors = gradient, q_BNLH, k_BKSH, v_BKSH, out_BNLH, lse_BNL
    return operator(*tensors, 0.0, mask is None, attn_mask=mask, scale=scale)


def packed_attention(
    q_TNH: Tensor,
    k_TKH: Tensor,
    v_TKH: Tensor,
    offsets: tuple[Tensor, Tensor],
    longest: tuple[int, int],
    *,
    sides: tuple[int, int],
    scale: float | None,
) -> tuple[Tensor, Tensor]:
    """Compute `torch.nn.attention.varlen.varlen_attn` -> (output [T, N, H], log-sum-exp [N, T]).

    Since torch 2.15, the public function may take cuDNN. The operators below it run flash attention unless they are
    told otherwise, so that backward has the backend of forward.

    Args:
        offsets: of queries and of keys.
        longest: queries and keys of a document, at most.
        sides: `window_size`.
    """
    from torch.nn.attention import varlen  # registers the operators; the import takes a second

    groups: dict[str, Any] = {"enable_gqa": True} if q_TNH.shape[1] != k_TKH.shape[1] else {}  # else torch 2.11
    out_TNH, lse_NT, _ = varlen._varlen_attn(
        q_TNH, k_TKH, v_TKH, *offsets, *longest, sides == (-1, 0), scale, list(sides), **groups
    )
    return out_TNH, lse_NT


def packed_attention_backward(
    gradient: Tensor,
    q_TNH: Tensor,
    k_TKH: Tensor,
    v_TKH: Tensor,
    out_TNH: Tensor,
    lse_NT: Tensor,
    offsets: tuple[Tensor, Tensor],
    longest: tuple[int, int],
    *,
    sides: tuple[int, int],
    scale: float | None,
) -> Gradients:
    """Return the gradients of `packed_attention`, whose weights are exp(score - lse)."""
    random = torch.zeros(2, dtype=torch.uint64, device=q_TNH.device)  # not used without dropout
    tensors = gradient, q_TNH, k_TKH, v_TKH, out_TNH, lse_NT, *offsets
    operator = torch.ops.torch_attn._varlen_attn_backward
    return operator(*tensors, *longest, sides == (-1, 0), random, scale, list(sides))
