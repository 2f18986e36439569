"""Layers that models share: single-device mathematics. Layers know no ranks and no meshes. Operations whose best form
depends on the device come from `self.kernels`.

Shape suffixes: B batch, L sequence, D model dim, N query heads, K key/value heads, H head dim, F feed-forward dim,
V vocabulary, T all B * L tokens, 1 a dim that broadcasts.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from titanlite.ops.attention import AttentionMask, Documents, Scores, attend
from titanlite.ops.functions import geglu, rotate, swiglu
from titanlite.ops.kernels import DEFAULT_KERNELS, Kernels, KeySource
from titanlite.runtime.private_torch.tensors import has_hooks

__all__ = [
    "Attention",
    "AttentionMask",
    "Documents",
    "Embedding",
    "FeedForward",
    "Head",
    "KeySource",
    "LayerOfHeads",
    "Linear",
    "Loss",
    "RMSNorm",
    "Rope",
    "attend",
    "geglu",
    "rope_at",
    "rope_cos_sin",
    "rotate",
    "swiglu",
]

Loss = Callable[[Tensor, Tensor], Any]
"""(hidden [B, L, D], weight [V, D]) -> scalars. It owns the matmul with the vocabulary, so that a loss can avoid ever
holding the full logits."""


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotary positions (arXiv:2104.09864), and how they are scaled to longer sequences than those of training."""

    theta: float
    """Base of the wavelengths."""
    factor: float = 1.0
    """Factor of the sequence length; 1 is no scaling."""
    original_seq_len: int = 8192
    """Tokens of a sequence in the training that came before."""
    scaling: Literal["llama3", "yarn", "linear"] = "llama3"
    """llama3 (arXiv:2407.21783, Meta's release): wavelengths beyond original_seq_len are multiplied by the factor,
    those below a quarter of it are kept, and those between are interpolated. yarn (arXiv:2309.00071): interpolated
    between the dims that turn `beta_fast` times and once in original_seq_len tokens, and scores are sharper. linear
    (arXiv:2306.15595): all wavelengths are multiplied."""
    beta_fast: float = 32.0
    """Turns in original_seq_len tokens from which on yarn keeps the wavelength."""
    mscale: bool = True
    """False: yarn does not make scores of the dims with positions sharper."""
    truncate: bool = True
    """The two dims of yarn are rounded: down, and up."""


def rope_cos_sin(rotary_dims: int, max_seq_len: int, rope: Rope) -> tuple[Tensor, Tensor]:
    """Return cos and sin tables, float32 [max_seq_len, rotary_dims], for `rotate`."""
    inv_freq = rope.theta ** (-torch.arange(0, rotary_dims, 2, dtype=torch.float32) / rotary_dims)
    size = 1.0
    if rope.scaling == "yarn":
        turns_most, turns_1 = (
            rotary_dims * math.log(rope.original_seq_len / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))
            for turns in (rope.beta_fast, 1)
        )
        if rope.truncate:
            turns_most, turns_1 = math.floor(turns_most), math.ceil(turns_1)
        first, last = max(turns_most, 0), min(turns_1, rotary_dims - 1)
        keep = 1 - ((torch.arange(rotary_dims // 2) - first) / max(last - first, 1e-3)).clamp(0, 1)
        size = yarn_size(rope.factor) if rope.mscale else 1.0
    elif rope.scaling == "linear":
        keep = 0.0
    else:
        low, high = 1.0, 4.0
        turns = rope.original_seq_len * inv_freq / (2 * math.pi)
        keep = ((turns - low) / (high - low)).clamp(0, 1)
    inv_freq = (1 - keep) * inv_freq / rope.factor + keep * inv_freq
    angles = torch.outer(torch.arange(max_seq_len, dtype=torch.float32), inv_freq)
    angles = torch.cat((angles, angles), dim=-1)
    return (angles.cos(), angles.sin()) if size == 1 else (angles.cos() * size, angles.sin() * size)


def yarn_size(factor: float) -> float:
    """Return the factor of queries and keys whose positions yarn scales, which makes scores sharper."""
    return 0.1 * math.log(factor) + 1


def rope_at(table_LH: Tensor, seq_len: int, documents: Documents | None) -> Tensor:
    """Return the entries of a cos or sin table for a batch: [L, H], or [B, 1, L, H] by the positions in documents."""
    return table_LH[:seq_len] if documents is None else table_LH[documents.positions_BL].unsqueeze(1)


class Linear(nn.Linear):
    """Linear layer, without a bias by default."""

    kernels: Kernels = DEFAULT_KERNELS
    sum_over_ranks: Callable[[Tensor], Tensor] | None = None
    """Sums over the ranks that have the other parts of x, before the bias is added. None: x is whole. Tensor
    parallelism sets it."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool = False) -> None:
        super().__init__(in_features, out_features, bias=bias)

    def forward(self, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        out = self.kernels.linear(x, self.weight)
        return self.add_bias(out if self.sum_over_ranks is None else self.sum_over_ranks(out))

    def add_bias(self, out: Tensor) -> Tensor:
        """Add the bias, if there is one, to the matmul's result."""
        return out if self.bias is None else out + self.bias


class Embedding(nn.Embedding):
    """Rows of a table by the numbers of tokens."""

    kernels: Kernels = DEFAULT_KERNELS

    def reset_parameters(self) -> None:
        """Draw values, but none on the meta device: the first normal numbers there make PyTorch import its compiler,
        which takes a second or more."""
        if not self.weight.is_meta:
            super().reset_parameters()

    def forward(self, input: Tensor) -> Tensor:
        return self.kernels.embedding(input, self.weight, self.padding_idx)


def linear_of_each(x: Tensor, *layers: nn.Module) -> tuple[Tensor, ...]:
    """Return the outputs of linear layers that have the same input."""
    plain = [layer for layer in layers if type(layer) is Linear and not has_hooks(layer)]
    if len(plain) < len(layers) or torch.compiler.is_compiling():
        return tuple(layer(x) for layer in layers)
    outs = plain[0].kernels.linears(x, [layer.weight for layer in plain])
    return tuple(layer.add_bias(out) for layer, out in zip(plain, outs, strict=True))


class RMSNorm(nn.RMSNorm):
    """x / sqrt(mean(x^2) + eps) * weight (arXiv:1910.07467), computed in float32."""

    kernels: Kernels = DEFAULT_KERNELS
    mean_over_ranks: Callable[[Tensor], Tensor] | None = None
    """Averages over the ranks that have the other parts of x. None: x is whole. Tensor parallelism sets it."""
    offset: float = 0.0
    """Added to the weight, in float32."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.float() + self.offset if self.offset else self.weight
        if self.mean_over_ranks is None:
            return self.kernels.rms_norm(x, weight, self.eps)
        size = self.mean_over_ranks(x.float().square().mean(-1, keepdim=True))
        assert self.eps is not None
        return (x.float() * torch.rsqrt(size + self.eps) * weight.float()).to(x.dtype)


class LayerOfHeads(nn.Module):
    """Layer that mixes tokens, in heads between which several processes can split it."""

    kernels: Kernels = DEFAULT_KERNELS
    key_source: KeySource | None = None
    of_heads: tuple[str, ...] = ()
    """Names of its parameters with an equal part of dim 0 for each head, in the order of heads. Tensor parallelism
    splits them."""
    own_heads: Callable[[Tensor], Tensor] | None = None
    """Takes this process's heads out of a tensor [heads, ...] of a parameter that is not split, because its rows are in
    another order. None: they are all. Tensor parallelism sets it."""
    computes_whole_sequences: bool = False
    """Whether it needs all earlier tokens, so that processes with parts of sequences exchange them for heads."""

    def heads(self) -> dict[str, int]:
        """Return the numbers of heads by kind."""
        raise NotImplementedError

    def kernel_name(self, device: torch.device, dtype: torch.dtype) -> str:
        """Return what computes the layer beside the kernels of attention, for the first lines of a run."""
        return ""


class Attention(LayerOfHeads):
    """Causal grouped-query attention (arXiv:2305.13245) with rotary positions; with a mask, to what it leaves only.

    Args:
        qk_norm_eps: epsilon of an RMSNorm of queries and keys (arXiv:2302.05442). None: no such norm.
        norms_heads: the norm is of each head. False: of all heads together.
        rotates: False: without positions. Of each head, as many dims are rotated as the tables have.
        biases: which of wq, wk, wv and wo have a bias, by their last letters.
        scale: factor of the scores. None: 1 / sqrt(head_dim).
        has_sinks: each query head has a learned score that takes part in the softmax and has no value
            (arXiv:2309.17453).
        has_gate: the output is multiplied by the sigmoid of a gate (arXiv:2505.06708). Of each head, wq has the rows of
            the query and behind them those of the gate. Only with norms of each head, or with none.
    """

    of_heads = ("sinks",)
    sinks: Tensor | None

    def __init__(
        self,
        dim: int,
        n_heads: int,
        n_kv_heads: int,
        head_dim: int,
        *,
        qk_norm_eps: float | None = None,
        norms_heads: bool = True,
        rotates: bool = True,
        biases: Literal["", "qkv", "qkvo"] = "",
        scale: float | None = None,
        has_sinks: bool = False,
        has_gate: bool = False,
    ) -> None:
        super().__init__()
        assert norms_heads or not has_gate
        self.head_dim = head_dim
        self.norms_heads = norms_heads
        self.rotates = rotates
        self.scale, self.has_gate = scale, has_gate
        self.wq = Linear(dim, n_heads * head_dim * (2 if has_gate else 1), bias="q" in biases)
        self.wk = Linear(dim, n_kv_heads * head_dim, bias="k" in biases)
        self.wv = Linear(dim, n_kv_heads * head_dim, bias="v" in biases)
        self.wo = Linear(n_heads * head_dim, dim, bias="o" in biases)
        self.register_parameter("sinks", nn.Parameter(torch.empty(n_heads)) if has_sinks else None)
        of_q, of_k = (1, 1) if norms_heads else (n_heads, n_kv_heads)
        self.q_norm = nn.Identity() if qk_norm_eps is None else RMSNorm(of_q * head_dim, eps=qk_norm_eps)
        self.k_norm = nn.Identity() if qk_norm_eps is None else RMSNorm(of_k * head_dim, eps=qk_norm_eps)

    def heads(self) -> dict[str, int]:
        return {"query": self.wo.in_features // self.head_dim, "key/value": self.wk.out_features // self.head_dim}

    def forward(self, x_BLD: Tensor, cos_LH: Tensor, sin_LH: Tensor, mask: AttentionMask | None = None) -> Tensor:
        B, L, _ = x_BLD.shape
        q, k, v = linear_of_each(x_BLD, self.wq, self.wk, self.wv)
        if not self.norms_heads:
            q, k = self.q_norm(q), self.k_norm(k)
        gate_BLNH = None
        if self.has_gate:
            q, gate_BLNH = q.view(B, L, -1, 2 * self.head_dim).chunk(2, dim=-1)
        q, k, v = (x.view(B, L, -1, self.head_dim) for x in (q, k, v))
        if self.norms_heads:
            q, k = self.q_norm(q), self.k_norm(k)
        q_BNLH, k_BKLH, v_BKLH = (x.transpose(1, 2) for x in (q, k, v))
        if self.rotates:
            q_BNLH, k_BKLH = rotate(q_BNLH, cos_LH, sin_LH), rotate(k_BKLH, cos_LH, sin_LH)
        scores = Scores(self.scale, self.sinks)
        out_BLNH = self.kernels.attend(q_BNLH, k_BKLH, v_BKLH, mask, self.key_source, scores).transpose(1, 2)
        if gate_BLNH is not None:
            out_BLNH = out_BLNH * gate_BLNH.sigmoid()
        return self.wo(out_BLNH.reshape(B, L, -1))


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

    further_norm: RMSNorm
    """Norm of the hidden states of a `FurtherToken`, in decoders that have one."""

    def __init__(self, dim: int, vocab_size: int, norm_eps: float) -> None:
        super().__init__()
        self.norm = RMSNorm(dim, eps=norm_eps)
        self.output = Linear(dim, vocab_size)

    def forward(self, x_BLD: Tensor, loss: Loss | None = None) -> Any:
        """Return the logits [B, L, V], or the result of `loss` on the hidden states and the projection's weight."""
        x_BLD = self.norm(x_BLD)
        return self.output(x_BLD) if loss is None else loss(x_BLD, self.output.weight)
