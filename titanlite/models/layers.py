"""Layers that models share for the same reason. Single-device code: no ranks, no meshes, and of devices only what a
tensor itself says, where a kernel is chosen.

Shape suffixes: B batch, L sequence, D model dim, N query heads, K key/value heads, H head dim, F feed-forward dim,
V vocabulary, T all B * L tokens, 1 a dim that broadcasts.
"""

import inspect
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Loss = Callable[[Tensor, Tensor], Any]
"""(hidden [B, L, D], weight [V, D]) -> scalars. It owns the product with the vocabulary, so that a loss can avoid ever
holding the full logits."""


class Documents(NamedTuple):
    """Where in a batch its documents are, so that each is seen as if it were alone. A tuple of tensors, so that what
    walks through inputs (FSDP, checkpointing, the compiler) finds them."""

    positions_BL: Tensor
    """int64: from 0 in each document, and in each row."""
    ids_BL: Tensor
    """int32: the document's number in its row, ascending."""
    boundaries: Tensor
    """int32 [documents + 1]: where documents begin among the B * L tokens (rows begin one too), and B * L."""


class Boundaries(NamedTuple):
    """Of the documents, for a kernel that takes them packed: int32 [documents + 1]."""

    offsets: Tensor


AttentionMask = Tensor | Boundaries
"""What holds attention within documents. A tensor [B, 1, L, L] is added to the scores: 0, or -inf where the key is of
another document or of a later token."""


def attention_mask(documents: Documents, x_BLD: Tensor, head_dim: int) -> AttentionMask:
    """For all blocks of one forward pass, as the device and type of `x_BLD` take it best."""
    if has_packed_kernel(x_BLD.device, x_BLD.dtype, head_dim):
        # The number of documents is another one in each batch: say so, or the second batch compiles every block anew.
        torch._dynamo.maybe_mark_dynamic(documents.boundaries, 0)
        return Boundaries(documents.boundaries)
    ids_BL = documents.ids_BL
    allowed_B1LL = (ids_BL[:, None, :, None] == ids_BL[:, None, None, :]).tril()
    # Of the type of the scores: a boolean mask would be converted, and kept for backward, once a block.
    blocked_B1LL = torch.zeros(allowed_B1LL.shape, dtype=x_BLD.dtype, device=x_BLD.device)
    return blocked_B1LL.masked_fill_(~allowed_B1LL, -math.inf)


def has_packed_kernel(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether `packed_attention` runs: torch's flash attention of variable length. It needs an NVIDIA GPU from Ampere
    on and half precision, and with grouped queries torch 2.12, of which its arguments tell."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16) or head_dim % 8 or head_dim > 256:
        return False
    # Planning is on fake tensors of a device that need not be there.
    if not torch.cuda.is_available() or torch.version.hip or torch.cuda.get_device_capability(device) < (8, 0):
        return False
    if not torch.backends.cuda.is_flash_attention_available():
        return False
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return False
    return {"window_size", "enable_gqa"} <= inspect.signature(varlen_attn).parameters.keys()


def packed_attention(q_BNLH: Tensor, k_BKLH: Tensor, v_BKLH: Tensor, boundaries: Boundaries) -> Tensor:
    """Causal attention within documents, [B, N, L, H]: the time is that of the documents, and no mask is held."""
    from torch.nn.attention.varlen import varlen_attn  # it takes a second, and not every device has use for it

    q_TNH, k_TKH, v_TKH = (x.transpose(1, 2).flatten(0, 1) for x in (q_BNLH, k_BKLH, v_BKLH))
    B, _, L, _ = q_BNLH.shape
    # The longest document has at most L tokens; its true length is on the device, and asking would wait for it.
    out_TNH = varlen_attn(
        q_TNH, k_TKH, v_TKH, boundaries.offsets, boundaries.offsets, L, L, window_size=(-1, 0), enable_gqa=True
    )
    assert isinstance(out_TNH, Tensor)
    return out_TNH.unflatten(0, (B, L)).transpose(1, 2)


def attend(q_BNLH: Tensor, k_BKLH: Tensor, v_BKLH: Tensor, mask: AttentionMask | None) -> Tensor:
    """Causal attention, [B, N, L, H]; with a mask within documents only. Heads of queries can share those of keys."""
    if isinstance(mask, Boundaries):
        return packed_attention(q_BNLH, k_BKLH, v_BKLH, mask)
    grouped = q_BNLH.shape[1] != k_BKLH.shape[1]
    return F.scaled_dot_product_attention(
        q_BNLH, k_BKLH, v_BKLH, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped
    )


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


def rope_at(table_LH: Tensor, seq_len: int, documents: Documents | None) -> Tensor:
    """The rows of a cos or sin table that a batch needs: [L, H], or [B, 1, L, H] by the positions in documents."""
    return table_LH[:seq_len] if documents is None else table_LH[documents.positions_BL].unsqueeze(1)


def apply_rope(x_BNLH: Tensor, cos_LH: Tensor, sin_LH: Tensor) -> Tensor:
    """Rotate the pairs (i, i + H/2) of each head, in real arithmetic (so that it compiles); keeps x's dtype. cos and
    sin are as `rope_at` gives them."""
    x1, x2 = x_BNLH.chunk(2, dim=-1)
    return (x_BNLH * cos_LH + torch.cat((-x2, x1), dim=-1) * sin_LH).type_as(x_BNLH)


class Attention(nn.Module):
    """Causal grouped-query attention (arXiv:2305.13245) with rotary positions, with a mask within documents only.

    Args:
        qk_norm_eps: normalize each head's queries and keys (arXiv:2302.05442), with this in the root. None does not.
    """

    def __init__(
        self, dim: int, n_heads: int, n_kv_heads: int, head_dim: int, *, qk_norm_eps: float | None = None
    ) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.wq = nn.Linear(dim, n_heads * head_dim, bias=False)
        self.wk = nn.Linear(dim, n_kv_heads * head_dim, bias=False)
        self.wv = nn.Linear(dim, n_kv_heads * head_dim, bias=False)
        self.wo = nn.Linear(n_heads * head_dim, dim, bias=False)
        self.q_norm = nn.Identity() if qk_norm_eps is None else nn.RMSNorm(head_dim, eps=qk_norm_eps)
        self.k_norm = nn.Identity() if qk_norm_eps is None else nn.RMSNorm(head_dim, eps=qk_norm_eps)

    def forward(self, x_BLD: Tensor, cos_LH: Tensor, sin_LH: Tensor, mask: AttentionMask | None = None) -> Tensor:
        B, L, _ = x_BLD.shape
        q_BNLH = self.q_norm(self.wq(x_BLD).view(B, L, -1, self.head_dim)).transpose(1, 2)
        k_BKLH = self.k_norm(self.wk(x_BLD).view(B, L, -1, self.head_dim)).transpose(1, 2)
        v_BKLH = self.wv(x_BLD).view(B, L, -1, self.head_dim).transpose(1, 2)
        q_BNLH, k_BKLH = apply_rope(q_BNLH, cos_LH, sin_LH), apply_rope(k_BKLH, cos_LH, sin_LH)
        out_BNLH = attend(q_BNLH, k_BKLH, v_BKLH, mask)
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

    def forward(self, x_BLD: Tensor, loss: Loss | None = None) -> Any:
        """Logits [B, L, V], or what `loss` makes of the hidden states and the projection's weight."""
        x_BLD = self.norm(x_BLD)
        return self.output(x_BLD) if loss is None else loss(x_BLD, self.output.weight)
