"""Layers that models share: single-device mathematics. Layers know no ranks and no meshes. Operations whose best form
depends on the device come from `self.kernels`.

Shape suffixes: B batch, L sequence, D model dim, N query heads, K key/value heads, H head dim, F feed-forward dim,
V vocabulary, T all B * L tokens, 1 a dim that broadcasts.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from titanlite.ops.attention import AttentionMask, Documents, KeySource, attend
from titanlite.ops.functions import rotate, swiglu
from titanlite.ops.kernels import DEFAULT_KERNELS, Kernels
from titanlite.runtime.private_torch.tensors import has_hooks

__all__ = [
    "Attention",
    "AttentionMask",
    "Documents",
    "FeedForward",
    "Head",
    "KeySource",
    "Linear",
    "Loss",
    "RMSNorm",
    "attend",
    "rope_at",
    "rope_cos_sin",
    "rotate",
    "swiglu",
]

Loss = Callable[[Tensor, Tensor], Any]
"""(hidden [B, L, D], weight [V, D]) -> scalars. It owns the matmul with the vocabulary, so that a loss can avoid ever
holding the full logits."""


def rope_cos_sin(head_dim: int, max_seq_len: int, theta: float, scaling_factor: float = 1.0) -> tuple[Tensor, Tensor]:
    """cos and sin tables, float32 [max_seq_len, head_dim], for `rotate` (arXiv:2104.09864).

    Args:
        scaling_factor: of Llama 3.1 (arXiv:2407.21783, Meta's release); 1 is Llama 3. Wavelengths beyond the 8192
            tokens of Llama 3's training are multiplied by it. Those below a quarter of 8192 are kept, and those
            between are interpolated.
    """
    inv_freq = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    low, high, original_seq_len = 1.0, 4.0, 8192
    turns = original_seq_len * inv_freq / (2 * math.pi)
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    inv_freq = (1 - keep) * inv_freq / scaling_factor + keep * inv_freq
    angles = torch.outer(torch.arange(max_seq_len, dtype=torch.float32), inv_freq)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def rope_at(table_LH: Tensor, seq_len: int, documents: Documents | None) -> Tensor:
    """Entries of a cos or sin table for a batch: [L, H], or [B, 1, L, H] by the positions in documents."""
    return table_LH[:seq_len] if documents is None else table_LH[documents.positions_BL].unsqueeze(1)


class Linear(nn.Linear):
    """Linear layer without a bias."""

    kernels: Kernels = DEFAULT_KERNELS

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.kernels.linear(x, self.weight)


def linear_of_each(x: Tensor, *layers: nn.Module) -> tuple[Tensor, ...]:
    """Return the outputs of linear layers that have the same input."""
    plain = [layer for layer in layers if type(layer) is Linear and not has_hooks(layer)]
    if len(plain) < len(layers) or torch.compiler.is_compiling():
        return tuple(layer(x) for layer in layers)
    return plain[0].kernels.linears(x, [layer.weight for layer in plain])


class RMSNorm(nn.RMSNorm):
    """x / sqrt(mean(x^2) + eps) * weight (arXiv:1910.07467), computed in float32."""

    kernels: Kernels = DEFAULT_KERNELS

    def forward(self, x: Tensor) -> Tensor:
        return self.kernels.rms_norm(x, self.weight, self.eps)


class Attention(nn.Module):
    """Causal grouped-query attention (arXiv:2305.13245) with rotary positions; with a mask, within documents only.

    Args:
        qk_norm_eps: epsilon of an RMSNorm of each head's queries and keys (arXiv:2302.05442). None: no such norm.
    """

    kernels: Kernels = DEFAULT_KERNELS
    key_source: KeySource | None = None

    def __init__(
        self, dim: int, n_heads: int, n_kv_heads: int, head_dim: int, *, qk_norm_eps: float | None = None
    ) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.wq = Linear(dim, n_heads * head_dim)
        self.wk = Linear(dim, n_kv_heads * head_dim)
        self.wv = Linear(dim, n_kv_heads * head_dim)
        self.wo = Linear(n_heads * head_dim, dim)
        self.q_norm = nn.Identity() if qk_norm_eps is None else RMSNorm(head_dim, eps=qk_norm_eps)
        self.k_norm = nn.Identity() if qk_norm_eps is None else RMSNorm(head_dim, eps=qk_norm_eps)

    def forward(self, x_BLD: Tensor, cos_LH: Tensor, sin_LH: Tensor, mask: AttentionMask | None = None) -> Tensor:
        B, L, _ = x_BLD.shape
        q, k, v = (it.view(B, L, -1, self.head_dim) for it in linear_of_each(x_BLD, self.wq, self.wk, self.wv))
        q_BNLH, k_BKLH, v_BKLH = (it.transpose(1, 2) for it in (self.q_norm(q), self.k_norm(k), v))
        q_BNLH, k_BKLH = rotate(q_BNLH, cos_LH, sin_LH), rotate(k_BKLH, cos_LH, sin_LH)
        out_BNLH = self.kernels.attend(q_BNLH, k_BKLH, v_BKLH, mask, self.key_source)
        return self.wo(out_BNLH.transpose(1, 2).reshape(B, L, -1))


class FeedForward(nn.Module):
    """SwiGLU (arXiv:2002.05202): w2(silu(w1 x) * w3 x)."""

    def __init__(self, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.w1 = Linear(dim, hidden_dim)
        self.w2 = Linear(hidden_dim, dim)
        self.w3 = Linear(dim, hidden_dim)

    def forward(self, x_BLD: Tensor) -> Tensor:
        return self.w2(swiglu(*linear_of_each(x_BLD, self.w1, self.w3)))


class Head(nn.Module):
    """Final norm and projection to the vocabulary. They are one FSDP unit: one all-gather serves both, and a chunked
    loss can use the projection's weight many times without more communication."""

    def __init__(self, dim: int, vocab_size: int, norm_eps: float) -> None:
        super().__init__()
        self.norm = RMSNorm(dim, eps=norm_eps)
        self.output = Linear(dim, vocab_size)

    def forward(self, x_BLD: Tensor, loss: Loss | None = None) -> Any:
        """Return the logits [B, L, V], or the result of `loss` on the hidden states and the projection's weight."""
        x_BLD = self.norm(x_BLD)
        return self.output(x_BLD) if loss is None else loss(x_BLD, self.output.weight)
