"""Pre-norm decoder with rotary positions: the parts that Llama 3, Qwen3 and Qwen3-MoE share.

Shape suffixes: see `layers`.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from titanlite.models.base import (
    BRANCHES_OF_DECODER,
    DECODER,
    Model,
    ModelArgs,
    Roles,
    added_parameters,
    unique_parameters,
)
from titanlite.models.initial import Constant, InitialValues, Normal
from titanlite.models.layers import (
    Attention,
    AttentionMask,
    Documents,
    FeedForward,
    Head,
    Loss,
    RMSNorm,
    rope_at,
    rope_cos_sin,
)

MAX_LAYERS = 10_000


@dataclass(frozen=True, kw_only=True)
class DecoderArgs(ModelArgs):
    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    hidden_dim: int
    norm_eps: float
    rope_theta: float
    tied_head: bool = False

    @property
    def head_size(self) -> int:
        """Dims of one attention head."""
        return self.dim // self.n_heads

    def __post_init__(self) -> None:
        for name in ("dim", "n_layers", "n_heads", "n_kv_heads", "hidden_dim", "vocab_size", "max_seq_len"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.n_layers > MAX_LAYERS:  # a mistake in a file: building them would take hours
            raise ValueError(f"n_layers {self.n_layers:,} is more than {MAX_LAYERS:,}")
        if self.n_heads % self.n_kv_heads:
            raise ValueError(f"n_heads {self.n_heads} must be a multiple of n_kv_heads {self.n_kv_heads}")


class Block(nn.Module):
    """One pre-norm transformer block."""

    def __init__(self, args: DecoderArgs, *, attention: nn.Module, feed_forward: nn.Module) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(args.dim, eps=args.norm_eps)
        self.attention = attention
        self.ffn_norm = RMSNorm(args.dim, eps=args.norm_eps)
        self.feed_forward = feed_forward

    def forward(self, x_BLD: Tensor, cos_LH: Tensor, sin_LH: Tensor, mask: AttentionMask | None = None) -> Tensor:
        x_BLD = x_BLD + self.attention(self.attention_norm(x_BLD), cos_LH, sin_LH, mask)
        return x_BLD + self.feed_forward(self.ffn_norm(x_BLD))


class Decoder(Model):
    """Decoder of Llama. Other families override the parts of its blocks and their costs."""

    tensor_plan = DECODER
    roles: ClassVar[Roles] = BRANCHES_OF_DECODER
    rope_cos: Tensor
    rope_sin: Tensor

    def __init__(self, args: DecoderArgs) -> None:
        super().__init__(args)
        self.args: DecoderArgs = args
        self.tok_embeddings = nn.Embedding(args.vocab_size, args.dim)
        self.layers = nn.ModuleList(self.build_block() for _ in range(args.n_layers))
        self.head = Head(args.dim, args.vocab_size, args.norm_eps)
        if args.tied_head:
            self.head.output.weight = self.tok_embeddings.weight
        self.register_buffer("rope_cos", torch.empty(args.max_seq_len, args.head_size), persistent=False)
        self.register_buffer("rope_sin", torch.empty(args.max_seq_len, args.head_size), persistent=False)

    def build_block(self) -> Block:
        return Block(self.args, attention=self.build_attention(), feed_forward=self.build_feed_forward())

    def build_attention(self) -> nn.Module:
        args = self.args
        return Attention(args.dim, args.n_heads, args.n_kv_heads, args.head_size)

    def build_feed_forward(self) -> nn.Module:
        return FeedForward(self.args.dim, self.args.hidden_dim)

    def rope_tables(self) -> tuple[Tensor, Tensor]:
        """cos and sin for all positions, fp32 [max_seq_len, head_size]."""
        return rope_cos_sin(self.args.head_size, self.args.max_seq_len, self.args.rope_theta)

    def feed_forward_weights(self) -> int:
        """Weights of one block's feed-forward layer that a token is multiplied with."""
        return 3 * self.args.dim * self.args.hidden_dim

    def forward(self, tokens: Tensor, loss: Loss | None = None, *, documents: Documents | None = None) -> Any:
        seq_len = tokens.shape[1]
        cos_LH, sin_LH = rope_at(self.rope_cos, seq_len, documents), rope_at(self.rope_sin, seq_len, documents)
        x_BLD = self.tok_embeddings(tokens)
        mask = None
        if documents is not None:
            mask = self.kernels.attention_mask(documents, x_BLD, self.args.head_size, self.key_source)
        for block in self.layers:
            x_BLD = block(x_BLD, cos_LH, sin_LH, mask)
        return self.head(x_BLD, loss)

    def init_weight(self, name: str, shape: torch.Size) -> InitialValues:
        std = 0.02
        match name.split(".")[-2:]:
            case [("attention_norm" | "ffn_norm" | "norm" | "q_norm" | "k_norm"), "weight"]:
                return Constant(1.0)
            case [("wo" | "w2"), "weight"]:  # they add to the residual stream, once each a block (GPT-2)
                return Normal(std=std / (2 * self.args.n_layers) ** 0.5)
            case ["tok_embeddings", "weight"] if not self.args.tied_head:
                return Normal(std=1.0)
            case [("tok_embeddings" | "wq" | "wk" | "wv" | "w1" | "w3" | "output"), "weight"]:
                return Normal(std=std)
            case _:
                raise ValueError(f"no initial value is defined for parameter {name}")

    def init_buffers(self) -> None:
        self.rope_cos, self.rope_sin = self.rope_tables()

    def flops_per_token(self, seq_len: int, *, causal: bool = False) -> float:
        """Floating point operations of forward and backward for one token.

        Each weight of a matmul costs 2 operations forward and 4 backward. Attention's two matmuls cost 12 a layer, head
        dim and visible position: seq_len, or (seq_len + 1) / 2 on average with a causal mask. A frozen weight has no
        gradient, which saves 2. Backward ends at the first block with a trained parameter. Adapters are
        weights of matmuls, too.
        """
        args = self.args
        attention = args.dim * args.head_size * (2 * args.n_heads + 2 * args.n_kv_heads)
        weights = args.n_layers * (attention + self.feed_forward_weights()) + args.dim * args.vocab_size
        weights += sum(parameter.numel() for parameter in added_parameters(self).values())
        seen = (seq_len + 1) / 2 if causal else seq_len
        scores = args.n_heads * args.head_size * seen
        frozen = sum(self._weights_per_token(name, p) for name, p in unique_parameters(self) if not p.requires_grad)
        skipped = self._blocks_without_backward() * (2 * (attention + self.feed_forward_weights()) + 8 * scores)
        return 6 * weights + 12 * args.n_layers * scores - 2 * frozen - skipped

    def _weights_per_token(self, name: str, parameter: Tensor) -> float:
        """Weights of a parameter that a token is multiplied with. A lookup in a table multiplies none."""
        if parameter.ndim < 2 or (name.startswith("tok_embeddings.") and not self.args.tied_head):
            return 0
        return parameter.numel() * (self.share_of_experts() if parameter.ndim == 3 else 1)

    def share_of_experts(self) -> float:
        """Share of the experts that compute a token."""
        return 1.0

    def _blocks_without_backward(self) -> int:
        """Number of first blocks that backward does not reach, because nothing up to their end is trained."""
        if any(parameter.requires_grad for parameter in self.tok_embeddings.parameters()):
            return 0
        trains = [any(parameter.requires_grad for parameter in block.parameters()) for block in self.layers]
        return trains.index(True) if any(trains) else len(trains)
