"""Causal attention, over whole sequences or within the documents of a packed sequence.

Shape suffixes: see `layers`.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Documents(NamedTuple):
    """Positions and boundaries of the documents of a batch. Each document is then processed as if it were alone.

    The type is a tuple of tensors, so that FSDP, activation checkpointing and the compiler find the tensors in a
    block's inputs.
    """

    positions_BL: Tensor
    """Position of each token in its document, int64, from 0."""
    ids_BL: Tensor
    """Number of each token's document within its sequence, int32, ascending."""
    boundaries: Tensor
    """Start of each document among the B * L tokens, then B * L: int32 [documents + 1]. Sequences start one too."""


class Boundaries(NamedTuple):
    """Boundaries of documents, for a kernel that takes documents packed: int32 [documents + 1]."""

    offsets: Tensor


AttentionMask = Tensor | Boundaries
"""Mask that keeps attention within documents. A tensor [B, 1, L, L] is added to the scores: 0, or -inf where the key is
of another document or of a later token."""


def attend(q_BNLH: Tensor, k_BKLH: Tensor, v_BKLH: Tensor, mask: AttentionMask | None) -> Tensor:
    """Causal attention -> [B, N, L, H]; with a mask, within documents only. Query heads can share key heads."""
    if isinstance(mask, Boundaries):
        return _packed_attention(q_BNLH, k_BKLH, v_BKLH, mask)
    grouped = q_BNLH.shape[1] != k_BKLH.shape[1]
    return F.scaled_dot_product_attention(
        q_BNLH, k_BKLH, v_BKLH, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped
    )


def repeat_heads(x_BKLH: Tensor, n_heads: int) -> Tensor:
    """Repeat each key or value head for its group of query heads -> [B, N, L, H]."""
    return x_BKLH.repeat_interleave(n_heads // x_BKLH.shape[1], dim=1)


def additive_mask(documents: Documents, dtype: torch.dtype) -> Tensor:
    """Mask [B, 1, L, L] of a dtype: 0 within a document and -inf elsewhere.

    The mask has the dtype of the scores. A boolean mask would be converted, and kept for backward, once a block.
    """
    ids_BL = documents.ids_BL
    allowed_B1LL = (ids_BL[:, None, :, None] == ids_BL[:, None, None, :]).tril()
    blocked_B1LL = torch.zeros(allowed_B1LL.shape, dtype=dtype, device=ids_BL.device)
    return blocked_B1LL.masked_fill_(~allowed_B1LL, -math.inf)


def _packed_attention(q_BNLH: Tensor, k_BKLH: Tensor, v_BKLH: Tensor, boundaries: Boundaries) -> Tensor:
    """Causal attention within documents -> [B, N, L, H]. Time grows with the documents' lengths; no mask is stored."""
    from torch.nn.attention.varlen import varlen_attn  # the import takes a second, and not every device needs it

    q_TNH, k_TKH, v_TKH = (x.transpose(1, 2).flatten(0, 1) for x in (q_BNLH, k_BKLH, v_BKLH))
    B, _, L, _ = q_BNLH.shape
    # The longest document has at most L tokens. Its true length is on the device, and reading it would wait.
    out_TNH = varlen_attn(
        q_TNH, k_TKH, v_TKH, boundaries.offsets, boundaries.offsets, L, L, window_size=(-1, 0), enable_gqa=True
    )
    assert isinstance(out_TNH, Tensor)
    return out_TNH.unflatten(0, (B, L)).transpose(1, 2)
