"""Gated DeltaNet (arXiv:2412.06464): a layer that keeps a state of fixed size in the place of keys and values.

Shape suffixes: as in `layers`; C channels of the convolution, X value heads, K dims of a key, V of a value.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titanlite.models.layers import Linear, RMSNorm, linear_of_each
from titanlite.ops.delta_rule import gated_delta_rule

NORM_EPS = 1e-6
"""Added to the squared length of a query or key."""


class GatedNorm(RMSNorm):
    """RMSNorm(x) * silu(gate), computed in float32."""

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return (super().forward(x) * F.silu(gate.float())).type_as(x)


class GatedDeltaNet(nn.Module):
    """Short convolutions of queries, keys and values, the gated delta rule in float32, and a norm with a gate.

    Args:
        key_dim: dims of a query or key of one head.
        value_dim: dims of a value of one head.
        conv_size: tokens that a convolution sees, 2 or more.

    The rows of `qkvz` are, for each key head, its query, its key, its values and their gates; those of `ba`, its betas
    and its decays, of one for each value head.
    """

    vectors = ("conv",)
    past: dict[str, Tensor] | None = None
    """State, and last inputs of the convolutions, after the tokens so far. None: nothing is kept."""

    def __init__(
        self,
        dim: int,
        *,
        n_key_heads: int,
        n_value_heads: int,
        key_dim: int,
        value_dim: int,
        conv_size: int,
        norm_eps: float,
    ) -> None:
        super().__init__()
        self.n_key_heads, self.key_dim, self.value_dim = n_key_heads, key_dim, value_dim
        keys, values = n_key_heads * key_dim, n_value_heads * value_dim
        self.qkvz = Linear(dim, 2 * keys + 2 * values)
        self.ba = Linear(dim, 2 * n_value_heads)
        self.conv = nn.Parameter(torch.empty(2 * keys + values, 1, conv_size))
        self.a_log = nn.Parameter(torch.empty(n_value_heads))
        self.dt_bias = nn.Parameter(torch.empty(n_value_heads))
        self.norm = GatedNorm(value_dim, eps=norm_eps)
        self.out = Linear(values, dim)

    def forward(self, x_BLD: Tensor, _cos: Tensor, _sin: Tensor, positions_BL: Tensor | None = None) -> Tensor:
        """Return the outputs [B, L, D].

        Args:
            positions_BL: of the tokens in their documents. None: each sequence is one.
        """
        B, L, _ = x_BLD.shape
        qkvz, ba = linear_of_each(x_BLD, self.qkvz, self.ba)
        group = len(self.a_log) // self.n_key_heads
        sizes = self.key_dim, self.key_dim, group * self.value_dim, group * self.value_dim
        *qkv, gate = qkvz.view(B, L, self.n_key_heads, -1).split(sizes, dim=-1)
        b_BLX, a_BLX = (it.flatten(2) for it in ba.view(B, L, self.n_key_heads, -1).chunk(2, dim=-1))
        mixed_BLC = F.silu(self._convolve(torch.cat([it.flatten(2) for it in qkv], dim=-1), positions_BL))
        q, k, v = mixed_BLC.split([it[0, 0].numel() for it in qkv], dim=-1)
        q, k = (it.unflatten(-1, (-1, self.key_dim)).float() for it in (q, k))
        q, k = (it * torch.rsqrt(it.square().sum(-1, keepdim=True) + NORM_EPS) for it in (q, k))
        q_BXLK, k_BXLK = (it.transpose(1, 2).repeat_interleave(group, dim=1) for it in (q, k))
        v_BXLV = v.unflatten(-1, (-1, self.value_dim)).transpose(1, 2).float()
        decay_BLX = -self.a_log.float().exp() * F.softplus(a_BLX.float() + self.dt_bias.float())
        inputs = q_BXLK, k_BXLK, v_BXLV, decay_BLX.transpose(1, 2), b_BLX.float().sigmoid().transpose(1, 2)
        past = self.past or {}
        out_BXLV, state = gated_delta_rule(*inputs, positions_BL=positions_BL, state_BNKV=past.get("state"))
        if self.past is not None:
            self.past["state"] = state
        out_BLXV = self.norm(out_BXLV.transpose(1, 2).type_as(x_BLD), gate.reshape(B, L, -1, self.value_dim))
        return self.out(out_BLXV.flatten(2))

    def _convolve(self, x_BLC: Tensor, positions_BL: Tensor | None) -> Tensor:
        """Convolve each channel of tokens with those before it, within documents."""
        B, L, C = x_BLC.shape
        size, past = self.conv.shape[-1], self.past or {}
        before = past["inputs"] if "inputs" in past else x_BLC.new_zeros(B, size - 1, C)
        padded = torch.cat([before, x_BLC], dim=1)
        if self.past is not None:
            self.past["inputs"] = padded[:, L:]
        out_BLC = x_BLC.float() * self.conv[:, 0, -1].float()
        for back in range(1, size):
            earlier_BLC = padded[:, size - 1 - back : size - 1 - back + L]
            if positions_BL is not None:
                earlier_BLC = earlier_BLC.masked_fill((positions_BL < back).unsqueeze(-1), 0)
            out_BLC = out_BLC + earlier_BLC * self.conv[:, 0, -1 - back].float()
        return out_BLC.type_as(x_BLC)
