"""Llama 3, 3.1 and 3.2 (arXiv:2407.21783). Parameter names follow Meta's; RoPE pairs follow Hugging Face's halves.

Shape suffixes: see `layers`.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from titanlite.models.base import Model, ModelArgs
from titanlite.models.layers import (
    Attention,
    AttentionMask,
    Documents,
    FeedForward,
    Head,
    Loss,
    attention_mask,
    rope_at,
    rope_cos_sin,
)


@dataclass(frozen=True, kw_only=True)
class Llama3Args(ModelArgs):
    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    hidden_dim: int
    vocab_size: int = 128256
    max_seq_len: int = 131072
    norm_eps: float = 1e-5
    rope_theta: float = 500000.0
    rope_scaling_factor: float = 8.0
    tied_head: bool = False

    def __post_init__(self) -> None:
        for name in ("dim", "n_layers", "n_heads", "n_kv_heads", "hidden_dim", "vocab_size", "max_seq_len"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.dim % (2 * self.n_heads):
            raise ValueError(f"dim {self.dim} must be a multiple of 2 x n_heads ({self.n_heads})")
        if self.n_heads % self.n_kv_heads:
            raise ValueError(f"n_heads {self.n_heads} must be a multiple of n_kv_heads {self.n_kv_heads}")

    @property
    def head_dim(self) -> int:
        return self.dim // self.n_heads


class Block(nn.Module):
    """One pre-norm transformer block."""

    def __init__(self, args: Llama3Args) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(args.dim, eps=args.norm_eps)
        self.attention = Attention(args.dim, args.n_heads, args.n_kv_heads, args.head_dim)
        self.ffn_norm = nn.RMSNorm(args.dim, eps=args.norm_eps)
        self.feed_forward = FeedForward(args.dim, args.hidden_dim)

    def forward(self, x_BLD: Tensor, cos_LH: Tensor, sin_LH: Tensor, mask: AttentionMask | None = None) -> Tensor:
        x_BLD = x_BLD + self.attention(self.attention_norm(x_BLD), cos_LH, sin_LH, mask)
        return x_BLD + self.feed_forward(self.ffn_norm(x_BLD))


class Llama3(Model):
    flavors: ClassVar[dict[str, ModelArgs]] = {
        "debug": Llama3Args(
            dim=384, n_layers=6, n_heads=6, n_kv_heads=3, hidden_dim=1024, vocab_size=2048, max_seq_len=8192,
            rope_theta=10000.0, rope_scaling_factor=1.0,
        ),
        "1B": Llama3Args(
            dim=2048, n_layers=16, n_heads=32, n_kv_heads=8, hidden_dim=8192, rope_scaling_factor=32.0, tied_head=True
        ),
        "3B": Llama3Args(
            dim=3072, n_layers=28, n_heads=24, n_kv_heads=8, hidden_dim=8192, rope_scaling_factor=32.0, tied_head=True
        ),
        "8B": Llama3Args(dim=4096, n_layers=32, n_heads=32, n_kv_heads=8, hidden_dim=14336),
        "70B": Llama3Args(dim=8192, n_layers=80, n_heads=64, n_kv_heads=8, hidden_dim=28672),
        "405B": Llama3Args(dim=16384, n_layers=126, n_heads=128, n_kv_heads=8, hidden_dim=53248),
    }  # fmt: skip

    rope_cos: Tensor
    rope_sin: Tensor

    def __init__(self, args: Llama3Args) -> None:
        super().__init__(args)
        self.args = args
        self.tok_embeddings = nn.Embedding(args.vocab_size, args.dim)
        self.layers = nn.ModuleList(Block(args) for _ in range(args.n_layers))
        self.head = Head(args.dim, args.vocab_size, args.norm_eps)
        if args.tied_head:
            self.head.output.weight = self.tok_embeddings.weight
        self.register_buffer("rope_cos", torch.empty(args.max_seq_len, args.head_dim), persistent=False)
        self.register_buffer("rope_sin", torch.empty(args.max_seq_len, args.head_dim), persistent=False)

    def forward(self, tokens: Tensor, loss: Loss | None = None, *, documents: Documents | None = None) -> Any:
        seq_len = tokens.shape[1]
        cos_LH, sin_LH = rope_at(self.rope_cos, seq_len, documents), rope_at(self.rope_sin, seq_len, documents)
        x_BLD = self.tok_embeddings(tokens)
        mask = None if documents is None else attention_mask(documents, x_BLD, self.args.head_dim)
        for block in self.layers:
            x_BLD = block(x_BLD, cos_LH, sin_LH, mask)
        return self.head(x_BLD, loss)

    def init_weight(self, name: str, weight: Tensor, generator: torch.Generator) -> None:
        std = 0.02
        match name.split(".")[-2:]:
            case [("attention_norm" | "ffn_norm" | "norm"), "weight"]:
                weight.fill_(1.0)
            case [("wo" | "w2"), "weight"]:  # they add to the residual stream, once each a block (GPT-2)
                weight.normal_(0.0, std / (2 * self.args.n_layers) ** 0.5, generator=generator)
            case ["tok_embeddings", "weight"] if not self.args.tied_head:
                weight.normal_(0.0, 1.0, generator=generator)
            case [("tok_embeddings" | "wq" | "wk" | "wv" | "w1" | "w3" | "output"), "weight"]:
                weight.normal_(0.0, std, generator=generator)
            case _:
                raise ValueError(f"no initial value is defined for parameter {name}")

    def init_buffers(self) -> None:
        self.rope_cos, self.rope_sin = rope_cos_sin(
            self.args.head_dim, self.args.max_seq_len, self.args.rope_theta, self.args.rope_scaling_factor
        )

    def flops_per_token(self, seq_len: int, *, causal: bool = False) -> float:
        """Each weight of a matrix product costs 2 operations forward and 4 backward; attention's two products cost 12 a
        layer, head dim and position that is seen: seq_len, or with a causal mask (seq_len + 1) / 2 on average."""
        args = self.args
        attention = args.dim * args.head_dim * (2 * args.n_heads + 2 * args.n_kv_heads)
        weights = args.n_layers * (attention + 3 * args.dim * args.hidden_dim) + args.dim * args.vocab_size
        seen = (seq_len + 1) / 2 if causal else seq_len
        return 6 * weights + 12 * args.n_layers * args.dim * seen
