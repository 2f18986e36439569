"""Multi-head latent attention (arXiv:2405.04434, section 2.1): keys and values of all heads come from one short vector.

Shape suffixes: as in `layers`; C the latent dim, R the dims of a head that have positions.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from titanlite.models.layers import AttentionMask, LayerOfHeads, Linear, RMSNorm, linear_of_each, rotate
from titanlite.ops.attention import Scores

LATENT_EPS = 1e-6
"""Epsilon of the norms of latent vectors, whatever that of other norms is."""


class LatentAttention(LayerOfHeads):
    """Causal attention whose queries, keys and values come from normalized latent vectors, as in DeepSeek-V3.

    A key is that of its head, without positions, and behind it a part with positions that all heads share. The pairs
    that rotate are neighbours (2i, 2i + 1).

    Args:
        q_rank: dims of the latent vector of queries. None: queries come from the input.
        kv_rank: dims of the latent vector of keys and values.
        nope_dim: dims of a query or key without positions.
        rope_dim: dims of a query or key with positions.
        v_dim: dims of a value, at most nope_dim + rope_dim.
        scale: factor of the scores. None: 1 / sqrt(nope_dim + rope_dim).
    """

    def __init__(
        self,
        dim: int,
        n_heads: int,
        *,
        q_rank: int | None,
        kv_rank: int,
        nope_dim: int,
        rope_dim: int,
        v_dim: int,
        scale: float | None = None,
    ) -> None:
        super().__init__()
        self.kv_rank, self.nope_dim, self.rope_dim, self.v_dim = kv_rank, nope_dim, rope_dim, v_dim
        self.scale = scale
        self.head_dim = nope_dim + rope_dim
        if q_rank is None:
            self.wq = Linear(dim, n_heads * self.head_dim)
        else:
            self.q_a = Linear(dim, q_rank)
            self.q_norm = RMSNorm(q_rank, eps=LATENT_EPS)
            self.wq_b = Linear(q_rank, n_heads * self.head_dim)
        self.has_q_rank = q_rank is not None
        self.kv_a = Linear(dim, kv_rank + rope_dim)
        self.kv_norm = RMSNorm(kv_rank, eps=LATENT_EPS)
        self.wkv_b = Linear(kv_rank, n_heads * (nope_dim + v_dim))
        self.wo = Linear(n_heads * v_dim, dim)

    def heads(self) -> dict[str, int]:
        return {"attention": self.wo.in_features // self.v_dim}

    def forward(self, x_BLD: Tensor, cos_LR: Tensor, sin_LR: Tensor, mask: AttentionMask | None = None) -> Tensor:
        B, L, _ = x_BLD.shape
        q, kv = linear_of_each(x_BLD, self.q_a if self.has_q_rank else self.wq, self.kv_a)
        if self.has_q_rank:
            q = self.wq_b(self.q_norm(q))
        latent_BLC, k_BLR = kv.split([self.kv_rank, self.rope_dim], dim=-1)
        q_BNLH = q.view(B, L, -1, self.head_dim).transpose(1, 2)
        kv_BNLH = self.wkv_b(self.kv_norm(latent_BLC)).view(B, L, -1, self.nope_dim + self.v_dim).transpose(1, 2)
        k_BNLH, v_BNLH = kv_BNLH.split([self.nope_dim, self.v_dim], dim=-1)
        q_BNLH, q_BNLR = q_BNLH.split([self.nope_dim, self.rope_dim], dim=-1)
        q_BNLR, k_B1LR = (rotate(in_halves(x), cos_LR, sin_LR) for x in (q_BNLR, k_BLR.unsqueeze(1)))
        q_BNLH = torch.cat([q_BNLH, q_BNLR], dim=-1)
        k_BNLH = torch.cat([k_BNLH, k_B1LR.expand(-1, k_BNLH.shape[1], -1, -1)], dim=-1)
        # Kernels, and ranks that exchange keys, need values of the size of keys. Zeros change no other dim.
        v_BNLH = F.pad(v_BNLH, (0, self.head_dim - self.v_dim))
        out_BNLH = self.kernels.attend(q_BNLH, k_BNLH, v_BNLH, mask, self.key_source, Scores(self.scale))
        return self.wo(out_BNLH[..., : self.v_dim].transpose(1, 2).reshape(B, L, -1))


def in_halves(x_BNLR: Tensor) -> Tensor:
    """Put pairs of neighbours (2i, 2i + 1) where `rotate` has them: (i, i + R/2). Scores do not depend on the order."""
    return x_BNLR.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
