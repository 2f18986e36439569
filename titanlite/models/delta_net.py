"""Gated DeltaNet (arXiv:2412.06464): a layer that keeps a state of fixed size in the place of keys and values.

Shape suffixes: as in `layers`; N key heads, each with G of all X value heads; C channels of the convolution of a key
head, W tokens that it sees; K dims of a key, V of a value.
"""

from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titanlite.models.layers import Documents, LayerOfHeads, Linear, RMSNorm, linear_of_each
from titanlite.ops.attention import repeat_heads
from titanlite.ops.delta_rule import gated_delta_rule
from titanlite.ops.kernels import SequenceSource

NORM_EPS = 1e-6
"""Added to the squared length of a query or key."""


class GatedNorm(RMSNorm):
    """RMSNorm(x) * silu(gate), computed in float32."""

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return (super().forward(x) * F.silu(gate.float())).type_as(x)


class GatedDeltaNet(LayerOfHeads):
    """Short convolutions of queries, keys and values, the gated delta rule in float32, and a norm with a gate.

    Args:
        key_dim: dims of a query or key of one head.
        value_dim: dims of a value of one head.
        conv_size: tokens that a convolution sees, 2 or more.

    The rows of `qkvz` are, for each key head, its query, its key, its values and their gates; those of `ba`, its betas
    and its decays, of one for each value head. The channels of `conv` are those of all queries, all keys and all
    values.
    """

    vectors = ("conv",)
    of_heads = ("a_log", "dt_bias")
    computes_whole_sequences = True
    key_source: SequenceSource | None = None  # pyright: ignore[reportIncompatibleVariableOverride]
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
        self.group = n_value_heads // n_key_heads
        keys, values = n_key_heads * key_dim, n_value_heads * value_dim
        self.qkvz = Linear(dim, 2 * keys + 2 * values)
        self.ba = Linear(dim, 2 * n_value_heads)
        self.conv = nn.Parameter(torch.empty(2 * keys + values, 1, conv_size))
        self.a_log = nn.Parameter(torch.empty(n_value_heads))
        self.dt_bias = nn.Parameter(torch.empty(n_value_heads))
        self.norm = GatedNorm(value_dim, eps=norm_eps)
        self.out = Linear(values, dim)

    def heads(self) -> dict[str, int]:
        return {"key": self.n_key_heads}

    def kernel_name(self, device: torch.device, dtype: torch.dtype) -> str:
        """Return what computes the layer."""
        is_fused = self.kernels.has_fused_delta_rule(device, dtype, self.key_dim)
        return f"gated delta rule by {'flash-linear-attention' if is_fused else 'PyTorch'}"

    def forward(self, x_BLD: Tensor, _cos: Tensor, _sin: Tensor, documents: Documents | None = None) -> Tensor:
        """Return the outputs [B, L, D].

        Args:
            documents: of whole sequences, with the position of each of their tokens. None: each sequence is one.
        """
        B, L, _ = x_BLD.shape
        qkvz, ba = linear_of_each(x_BLD, self.qkvz, self.ba)
        values = self.group * self.value_dim
        qkv, gate = qkvz.view(B, L, -1, 2 * self.key_dim + 2 * values).split([2 * self.key_dim + values, values], -1)
        inputs = [x.transpose(1, 2) for x in (qkv, ba.view(B, L, -1, 2 * self.group))]
        sizes = (self.n_key_heads * dims for dims in (self.key_dim, self.key_dim, values))
        channels = self.conv.squeeze(1).split([*sizes])
        conv_NCW = torch.cat([channel.unflatten(0, (self.n_key_heads, -1)) for channel in channels], dim=1)
        parameters = [parameter.view(-1, self.group) for parameter in (self.a_log, self.dt_bias)]
        parameters.append(conv_NCW if self.own_heads is None else self.own_heads(conv_NCW))
        if self.key_source is None:
            out_BXLV = self._mix(inputs, parameters, documents)
        else:
            out_BXLV = self.key_source.by_heads(partial(self._mix, documents=documents), inputs, parameters)
        out_BLXV = self.norm(out_BXLV.transpose(1, 2), gate.reshape(B, L, -1, self.value_dim))
        return self.out(out_BLXV.flatten(2))

    def _mix(self, inputs: Sequence[Tensor], parameters: Sequence[Tensor], documents: Documents | None) -> Tensor:
        """Compute whole sequences of some key heads, each with a group of G value heads -> [B, X, L, V].

        Args:
            inputs: queries, keys and values [B, N, L, C], and betas and decays [B, N, L, 2G].
            parameters: a_log [N, G], dt_bias [N, G], and conv [N, C, W].
        """
        (qkv_BNLC, ba), (a_log_NG, dt_bias_NG, conv_NCW) = inputs, parameters
        positions_BL = None if documents is None else documents.positions_BL
        mixed_BNLC = F.silu(self._convolve(qkv_BNLC, conv_NCW, positions_BL))
        q, k, v = mixed_BNLC.split([self.key_dim, self.key_dim, self.group * self.value_dim], dim=-1)
        q, k = (x.float() for x in (q, k))
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPS) for x in (q, k))
        v_BXLV = v.unflatten(-1, (self.group, -1)).transpose(2, 3).flatten(1, 2).float()
        b_BNGL, a_BNGL = ba.float().transpose(2, 3).chunk(2, dim=2)
        decay_BNGL = -a_log_NG.float().exp().unsqueeze(-1) * F.softplus(a_BNGL + dt_bias_NG.float().unsqueeze(-1))
        rest = v_BXLV, decay_BNGL.flatten(1, 2), b_BNGL.sigmoid().flatten(1, 2)
        if self.past is None:
            out_BXLV = self.kernels.gated_delta_rule(q, k, *rest, dtype=qkv_BNLC.dtype, documents=documents)
        else:
            q, k = (repeat_heads(x, v_BXLV.shape[1]) for x in (q, k))
            past = {"positions_BL": positions_BL, "state_BNKV": self.past.get("state")}
            out_BXLV, self.past["state"] = gated_delta_rule(q, k, *rest, **past)
        return out_BXLV.type_as(qkv_BNLC)

    def _convolve(self, x_BNLC: Tensor, conv_NCW: Tensor, positions_BL: Tensor | None) -> Tensor:
        """Convolve each channel of tokens with those before it, within documents."""
        B, N, L, C = x_BNLC.shape
        size, past = conv_NCW.shape[-1], self.past or {}
        before = past["inputs"] if "inputs" in past else x_BNLC.new_zeros(B, N, size - 1, C)
        padded = torch.cat([before, x_BNLC], dim=2)
        if self.past is not None:
            self.past["inputs"] = padded[:, :, L:]
        taps_N1C = conv_NCW.float().unsqueeze(1).unbind(-1)
        out_BNLC = x_BNLC.float() * taps_N1C[-1]
        for back in range(1, size):
            earlier_BNLC = padded[:, :, size - 1 - back : size - 1 - back + L]
            if positions_BL is not None:
                earlier_BNLC = earlier_BNLC.masked_fill((positions_BL < back)[:, None, :, None], 0)
            out_BNLC = out_BNLC + earlier_BNLC * taps_N1C[-1 - back]
        return out_BNLC.type_as(x_BNLC)
