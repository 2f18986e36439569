"""Causal attention to short sequences on a CPU, by batched matmuls over tiles of queries.

PyTorch's flash attention multiplies the small matrices of each head and sequence one by one there. Here one batched
matmul computes a tile of all of them. As in flash attention (arXiv:2205.14135), backward computes the weights again,
and no score is kept.

Shape suffixes: see `models/layers.py`; X = B * K key heads of the batch, M tiles, R rows of a tile: C queries
of each of the query heads that share a key head, V dims of a value.
"""

from typing import Any

import torch
from torch import Tensor

from titanlite.runtime.private_torch.tensors import softmax_gradient

SMALLEST = 32
"""Queries of the smallest tile. The length of a sequence is a multiple of it."""
TILES = 4
"""Tiles of a longer sequence: more would skip more of the scores that a query must not see, in more operators."""
LONGEST = 512
"""Tokens of a sequence from which on flash attention is about as fast."""


def has_tiles(seq_len: int, dtype: torch.dtype) -> bool:
    """Return whether `attend_in_tiles` computes the attention of a sequence to itself, and fast."""
    return dtype in (torch.float32, torch.bfloat16) and 0 < seq_len <= LONGEST and seq_len % SMALLEST == 0


def attend_in_tiles(q_BNLH: Tensor, k_BKLH: Tensor, v_BKLV: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    """Causal attention, or with a mask [B, 1, L, L] that is added to the scores -> [B, N, L, V].

    Query heads can share key heads, and values have dims of their own. Scores, weights and sums are float32.
    """
    return _attend(q_BNLH, k_BKLH, v_BKLV, mask, q_BNLH.shape[-1] ** -0.5 if scale is None else scale)


@torch.library.custom_op("titanlite::attend_in_tiles", mutates_args=())
def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    q_XMRH, k_XLH, v_XLV = _tiles(q, k.shape[1]).mul_(scale), k.flatten(0, 1).float(), v.flatten(0, 1).float()
    out_XMRV = q_XMRH.new_empty(*q_XMRH.shape[:3], v.shape[-1])
    for tile in range(q_XMRH.shape[1]):
        keys = slice((tile + 1) * _size(q))
        out_XMRV[:, tile] = torch.bmm(_weights(q_XMRH[:, tile], k_XLH[:, keys], mask, tile), v_XLV[:, keys])
    return _untile(out_XMRV, q)


@torch.library.custom_op("titanlite::attend_in_tiles_backward", mutates_args=())
def _attend_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    q_XMRH, d_out_XMRV = _tiles(q, k.shape[1]).mul_(scale), _tiles(gradient, k.shape[1])
    k_XLH, v_XLV = k.flatten(0, 1).float(), v.flatten(0, 1).float()
    d_q_XMRH, d_k_XLH, d_v_XLV = torch.empty_like(q_XMRH), *(it.new_zeros(it.shape) for it in (k_XLH, v_XLV))
    for tile in range(q_XMRH.shape[1]):
        keys, q_XRH, d_out_XRV = slice((tile + 1) * _size(q)), q_XMRH[:, tile], d_out_XMRV[:, tile]
        weights_XRS = _weights(q_XRH, k_XLH[:, keys], mask, tile)
        d_v_XLV[:, keys].baddbmm_(weights_XRS.mT, d_out_XRV)
        d_weights_XRS = torch.bmm(d_out_XRV, v_XLV[:, keys].mT)
        d_scores_XRS = softmax_gradient(d_weights_XRS, weights_XRS)
        d_k_XLH[:, keys].baddbmm_(d_scores_XRS.mT, q_XRH)
        d_q_XMRH[:, tile] = torch.bmm(d_scores_XRS, k_XLH[:, keys])
    return _untile(d_q_XMRH.mul_(scale), q), d_k_XLH.view(k.shape).type_as(k), d_v_XLV.view(v.shape).type_as(v)


def _weights(q_XRH: Tensor, k_XSH: Tensor, mask: Tensor | None, tile: int) -> Tensor:
    """Return the weights of a tile's queries, which are scaled: [X, R, S], 0 where a query must not see a key."""
    scores_XRS = torch.bmm(q_XRH, k_XSH.mT)
    size = scores_XRS.shape[2] // (tile + 1)
    rows = slice(tile * size, (tile + 1) * size)
    if mask is None:
        later_CC = torch.ones(size, size, dtype=torch.bool, device=scores_XRS.device).triu(1)
        scores_XRS.unflatten(1, (-1, size))[..., rows].masked_fill_(later_CC, -torch.inf)
    else:
        scores_XRS.view(len(mask), -1, size, rows.stop).add_(mask[:, :, rows, : rows.stop])
    return scores_XRS.softmax(dim=-1)


def _size(x_BNLH: Tensor) -> int:
    """Return the number of queries of a tile."""
    return max(SMALLEST, x_BNLH.shape[2] // TILES)


def _tiles(x_BNLH: Tensor, key_heads: int) -> Tensor:
    """Return float32 copies of queries by key head and tile: [X, M, R, H]."""
    x_BKGMCH = x_BNLH.unflatten(1, (key_heads, -1)).unflatten(3, (-1, _size(x_BNLH)))
    x_BKMGCH = x_BKGMCH.transpose(2, 3).to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    return x_BKMGCH.flatten(3, 4).flatten(0, 1)


def _untile(x_XMRH: Tensor, like_BNLH: Tensor) -> Tensor:
    """Return what `_tiles` had, in the dtype of another tensor, with the heads of a token next to each other."""
    B, N, L, _ = like_BNLH.shape
    out_BLNH = like_BNLH.new_empty(B, L, N, x_XMRH.shape[-1])
    x_BKMGCH = x_XMRH.unflatten(2, (-1, _size(like_BNLH))).unflatten(0, (B, -1))
    x_BMCKGH = x_BKMGCH.permute(0, 2, 4, 1, 3, 5)
    out_BLNH.view(x_BMCKGH.shape).copy_(x_BMCKGH)
    return out_BLNH.transpose(1, 2)


@_attend.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    B, N, L, _ = q.shape
    return q.new_empty(B, L, N, v.shape[-1]).transpose(1, 2)


@_attend_backward.register_fake
def _(gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, ...]:
    B, N, L, H = q.shape
    return q.new_empty(B, L, N, H).transpose(1, 2), k.new_empty(k.shape), v.new_empty(v.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.scale = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    return *_attend_backward(gradient, *ctx.saved_tensors, ctx.scale), None, None


_attend.register_autograd(_backward, setup_context=_save)
