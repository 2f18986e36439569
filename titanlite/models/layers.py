"""Layers that models share for the same reason. Single-device code: no ranks, no meshes, no devices.

Shape suffixes: B batch, L sequence, D model dim, N query heads, K key/value heads, H head dim, F feed-forward dim,
V vocabulary.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Loss = Callable[[Tensor, Tensor], Tensor]
"""(hidden [B, L, D], weight [V, D]) -> scalar. It owns the product with the vocabulary, so that a loss can avoid ever
holding the full logits."""


def rope_cos_sin(head_dim: int, max_seq_len: int, theta: float, scaling_factor: float = 1.0) -> tuple[Tensor, Tensor]:
    """cos and sin tables, fp32 [max_seq_len, head_dim], for `apply_rope` (arXiv:2104.09864).

    `scaling_factor` is Llama 3.1's: wavelengths beyond the 8192 tokens of Llama 3's own training are stretched by it,
    those below a quarter of that are kept, and those between are blended (arXiv:2407.21783, Meta's release). 1 is
    Llama 3.
    """
    inv_freq = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    low, high, original_seq_len = 1.0, 4.0, 8192
    turns = original_seq_len * inv_freq / (2 * math.pi)
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    inv_freq = (1 - keep) * inv_freq / scaling_factor + keep * inv_freq
    angles = torch.outer(torch.arange(max_seq_len, dtype=torch.float32), inv_freq)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def apply_rope(x_BNLH: Tensor, cos_LH: Tensor, sin_LH: Tensor) -> Tensor:
    """Rotate the pairs (i, i + H/2) of each head, in real arithmetic (so that it compiles); keeps x's dtype."""
    x1, x2 = x_BNLH.chunk(2, dim=-1)
    return (x_BNLH * cos_LH + torch.cat((-x2, x1), dim=-1) * sin_LH).type_as(x_BNLH)


class Attention(nn.Module):
    """Causal grouped-query attention (arXiv:2305.13245) with rotary positions."""

    def __init__(self, dim: int, n_heads: int, n_kv_heads: int, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.wq = nn.Linear(dim, n_heads * head_dim, bias=False)
        self.wk = nn.Linear(dim, n_kv_heads * head_dim, bias=False)
        self.wv = nn.Linear(dim, n_kv_heads * head_dim, bias=False)
        self.wo = nn.Linear(n_heads * head_dim, dim, bias=False)

    def forward(self, x_BLD: Tensor, cos_LH: Tensor, sin_LH: Tensor) -> Tensor:
        B, L, _ = x_BLD.shape
        q_BNLH = self.wq(x_BLD).view(B, L, -1, self.head_dim).transpose(1, 2)
        k_BKLH = self.wk(x_BLD).view(B, L, -1, self.head_dim).transpose(1, 2)
        v_BKLH = self.wv(x_BLD).view(B, L, -1, self.head_dim).transpose(1, 2)
        q_BNLH, k_BKLH = apply_rope(q_BNLH, cos_LH, sin_LH), apply_rope(k_BKLH, cos_LH, sin_LH)
        grouped = q_BNLH.shape[1] != k_BKLH.shape[1]
        out_BNLH = F.scaled_dot_product_attention(q_BNLH, k_BKLH, v_BKLH, is_causal=True, enable_gqa=grouped)
        return self.wo(out_BNLH.transpose(1, 2).reshape(B, L, -1))


class FeedForward(nn.Module):
    """SwiGLU (arXiv:2002.05202): w2(silu(w1 x) * w3 x)."""

    def __init__(self, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(dim, hidden_dim, bias=False)
        self.w2 = nn.Linear(hidden_dim, dim, bias=False)
        self.w3 = nn.Linear(dim, hidden_dim, bias=False)

    def forward(self, x_BLD: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x_BLD)) * self.w3(x_BLD))


class Head(nn.Module):
    """Final norm and projection to the vocabulary: one unit, so that one all-gather serves both, and so that a
    chunked loss can use the projection's weight many times without more communication."""

    def __init__(self, dim: int, vocab_size: int, norm_eps: float) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(dim, eps=norm_eps)
        self.output = nn.Linear(dim, vocab_size, bias=False)

    def forward(self, x_BLD: Tensor, loss: Loss | None = None) -> Tensor:
        """Logits [B, L, V], or what `loss` makes of the hidden states and the projection's weight."""
        x_BLD = self.norm(x_BLD)
        return self.output(x_BLD) if loss is None else loss(x_BLD, self.output.weight)
