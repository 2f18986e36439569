"""Attention that flash attention does not compute: by formulas that hold the scores, and by FlexAttention.

Shape suffixes: see `models/layers.py`; S keys, G query heads of a key head.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor


def attend_by_formula(
    q_BNLH: Tensor,
    k_BKSH: Tensor,
    v_BKSH: Tensor,
    mask: Tensor | None,
    scale: float | None,
    sinks_N: Tensor | None,
    soft_cap: float | None,
) -> Tensor:
    """Causal attention, or with a mask, on any device -> [B, N, L, H]. It holds all scores, in float32."""
    factor = q_BNLH.shape[-1] ** -0.5 if scale is None else scale
    q_BKGLH = q_BNLH.unflatten(1, (k_BKSH.shape[1], -1))
    scores_BNLS = (q_BKGLH @ k_BKSH.unsqueeze(2).mT).float().mul(factor).flatten(1, 2)
    if soft_cap is not None:
        scores_BNLS = torch.tanh(scores_BNLS / soft_cap) * soft_cap
    if mask is None:
        mask = torch.full(scores_BNLS.shape[-2:], -torch.inf, device=q_BNLH.device).triu(1)[None, None]
    scores_BNLS = scores_BNLS + mask
    if sinks_N is not None:
        sinks_BNL1 = sinks_N.float().view(-1, 1, 1).expand_as(scores_BNLS[..., :1])
        scores_BNLS = torch.cat([scores_BNLS, sinks_BNL1], dim=-1)
    weights_BNLS = scores_BNLS.softmax(-1)[..., : k_BKSH.shape[2]].type_as(v_BKSH)
    return (weights_BNLS.unflatten(1, (k_BKSH.shape[1], -1)) @ v_BKSH.unsqueeze(2)).flatten(1, 2)


def attend_packed(*operands: Tensor, **options: Any) -> Tensor:
    """Call `flex_attend` in compiled code: plain PyTorch would hold the scores."""
    return (flex_attend if torch.compiler.is_compiling() else _compiled())(*operands, **options)


@cache
def _compiled() -> Any:
    return torch.compile(flex_attend, fullgraph=True)


def flex_attend(
    q_BNLH: Tensor,
    k_BKSH: Tensor,
    v_BKSH: Tensor,
    query_offsets: Tensor,
    key_offsets: Tensor,
    *,
    window: int | None,
    scale: float | None,
    soft_cap: float,
) -> Tensor:
    """Causal attention within documents -> [B, N, L, H], whose scores have a soft cap, by FlexAttention.

    The last query is aligned with the last key. On a GPU, the compiler makes a kernel of it, which holds no scores.
    """
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention  # the import takes a second

    device = q_BNLH.device
    (B, _, L, _), S = q_BNLH.shape, k_BKSH.shape[2]
    ids_BL = torch.bucketize(torch.arange(B * L, device=device), query_offsets, right=True).view(B, L)
    ids_BS = torch.bucketize(torch.arange(B * S, device=device), key_offsets, right=True).view(B, S)

    def sees(b: Tensor, _: Tensor, query: Tensor, key: Tensor) -> Tensor:
        distance = query + (S - L) - key
        seen = (distance >= 0) & (ids_BL[b, query] == ids_BS[b, key])
        return seen if window is None else seen & (distance < window)

    def capped(score: Tensor, *_: Tensor) -> Tensor:
        return torch.tanh(score / soft_cap) * soft_cap

    mask = create_block_mask(sees, B, None, L, S, device=str(device))
    out = flex_attention(q_BNLH, k_BKSH, v_BKSH, capped, mask, scale=scale, enable_gqa=True)
    assert isinstance(out, Tensor)
    return out
