"""Causal attention to short sequences on a CPU, by batched matmuls over tiles of queries.

PyTorch's flash attention multiplies the small matrices of each head and sequence one by one there. Here one batched
matmul computes a tile of all of them. As in flash attention (arXiv:2205.14135), backward computes the weights again,
and no score is kept.

Shape suffixes: see `models/layers.py`; X = B * K key heads of the batch, R rows of a tile: C queries of
each of the query heads that share a key head, V dims of a value.
"""

from typing import Any

import torch
from torch import Tensor

from titanlite.runtime.private_torch.tensors import softmax_gradient

SMALLEST = 32
"""Queries of the smallest tile. The length of a sequence is a multiple of it."""
TILES = 4
"""Tiles of a longer sequence: more would skip more of the scores that a query must not see, in more operators."""
LEAST_SCORES = 2**18
"""Scores of a tile, if the sequences have so many: operators on fewer take as long as their start."""
LONGEST, LONGEST_BY_MKL = 512, 128
"""Tokens of a sequence from which on flash attention is about as fast; by MKL in float32, whose batched matmuls are
slower: at 256 tokens a step with flash attention took 0.8 of the time, and at 64 tokens 1.2."""


def has_tiles(seq_len: int, dtype: torch.dtype, *, by_onednn: bool) -> bool:
    """Return whether `attend_in_tiles` computes the attention of a sequence to itself, and fast.

    Args:
        by_onednn: whether oneDNN multiplies float32 matrices.
    """
    longest = {torch.bfloat16: LONGEST, torch.float32: LONGEST if by_onednn else LONGEST_BY_MKL}
    return 0 < seq_len <= longest.get(dtype, 0) and seq_len % SMALLEST == 0


def attend_in_tiles(q_BNLH: Tensor, k_BKLH: Tensor, v_BKLV: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    """Causal attention, or with a mask [B, 1, L, L] that is added to the scores -> [B, N, L, V].

    Query heads can share key heads, and values have dims of their own. Scores, weights and sums are float32.
    """
    return _attend(q_BNLH, k_BKLH, v_BKLV, mask, q_BNLH.shape[-1] ** -0.5 if scale is None else scale)


def forward_in_tiles(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    k_XLH, v_XLV = k.flatten(0, 1).float(), v.flatten(0, 1).float()
    out = _like_tokens(q, v.shape[-1])
    for tile in range(_count(q)):
        keys = slice((tile + 1) * _size(q))
        weights_XRS = _weights(_tile(q, tile, k).mul_(scale), k_XLH[:, keys], mask, tile)
        _put(out, tile, torch.bmm(weights_XRS, v_XLV[:, keys]))
    return out


def backward_in_tiles(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    k_XLH, v_XLV, d_q = k.flatten(0, 1).float(), v.flatten(0, 1).float(), _like_tokens(q, q.shape[-1])
    d_k_XLH, d_v_XLV = (x.new_zeros(x.shape) for x in (k_XLH, v_XLV))
    for tile in range(_count(q)):
        keys, q_XRH, d_out_XRV = slice((tile + 1) * _size(q)), _tile(q, tile, k).mul_(scale), _tile(gradient, tile, k)
        weights_XRS = _weights(q_XRH, k_XLH[:, keys], mask, tile)
        _add_product(d_v_XLV[:, keys], weights_XRS.mT, d_out_XRV)
        d_weights_XRS = torch.bmm(d_out_XRV, v_XLV[:, keys].mT)
        d_scores_XRS = softmax_gradient(d_weights_XRS, weights_XRS)
        _add_product(d_k_XLH[:, keys], d_scores_XRS.mT, q_XRH)
        _put(d_q, tile, torch.bmm(d_scores_XRS, k_XLH[:, keys]).mul_(scale))
    return d_q, d_k_XLH.view(k.shape).type_as(k), d_v_XLV.view(v.shape).type_as(v)


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add the batched product of a and b. Within a larger tensor, PyTorch would multiply the matrices one by one."""
    if total.is_contiguous():
        total.baddbmm_(a, b)
    else:
        total.add_(torch.bmm(a, b))


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
    B, N, L, _ = x_BNLH.shape
    size = max(SMALLEST, L // TILES)
    while B * N * size * L < LEAST_SCORES and L % (2 * size) == 0:
        size *= 2
    return size


def _count(x_BNLH: Tensor) -> int:
    """Return the number of tiles."""
    return x_BNLH.shape[2] // _size(x_BNLH)


def _tile(x_BNLH: Tensor, tile: int, like_BKLH: Tensor) -> Tensor:
    """Return a float32 copy of a tile's queries by key head: [X, R, H]."""
    x_BKGCH = _view(x_BNLH, tile, like_BKLH.shape[1])
    return x_BKGCH.to(torch.float32, copy=True, memory_format=torch.contiguous_format).flatten(2, 3).flatten(0, 1)


def _put(x_BNLH: Tensor, tile: int, values_XRH: Tensor) -> None:
    """Write what `_tile` returns, in the dtype of x."""
    x_BKGCH = _view(x_BNLH, tile, len(values_XRH) // len(x_BNLH))
    x_BKGCH.copy_(values_XRH.view(x_BKGCH.shape))


def _view(x_BNLH: Tensor, tile: int, key_heads: int) -> Tensor:
    size = _size(x_BNLH)
    return x_BNLH.unflatten(1, (key_heads, -1))[:, :, :, tile * size : (tile + 1) * size]


def _like_tokens(x_BNLH: Tensor, dims: int) -> Tensor:
    """Return memory for [B, N, L, dims] with the heads of a token next to each other."""
    B, N, L, _ = x_BNLH.shape
    return x_BNLH.new_empty(B, L, N, dims).transpose(1, 2)


@torch.library.custom_op("titanlite::attend_in_tiles", mutates_args=())
def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    return forward_in_tiles(q, k, v, mask, scale)


@torch.library.custom_op("titanlite::attend_in_tiles_backward", mutates_args=())
def _attend_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    return backward_in_tiles(gradient, q, k, v, mask, scale)


@_attend.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    return _like_tokens(q, v.shape[-1])


@_attend_backward.register_fake
def _(gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return _like_tokens(q, q.shape[-1]), k.new_empty(k.shape), v.new_empty(v.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.scale = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    return *_attend_backward(gradient, *ctx.saved_tensors, ctx.scale), None, None


_attend.register_autograd(_backward, setup_context=_save)
