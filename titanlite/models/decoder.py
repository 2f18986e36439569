"""Pre-norm decoder with rotary positions: the parts that Llama 3, Qwen3 and Qwen3-MoE share.

Shape suffixes: see `layers`.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from titanlite.models.base import (
    BRANCHES_OF_DECODER,
    DECODER,
    Model,
    ModelArgs,
    Roles,
)
from titanlite.models.flops import decoder_flops
from titanlite.models.initial import Constant, InitialValues, LessOne, Normal
from titanlite.models.layers import (
    Attention,
    AttentionMask,
    Documents,
    Embedding,
    FeedForward,
    Head,
    Loss,
    RMSNorm,
    Rope,
    rope_at,
    rope_cos_sin,
)
from titanlite.ops.attention import of_whole_sequences
from titanlite.ops.kernels import Kernels
from titanlite.runtime.dtypes import torch_dtype
from titanlite.schema import Config

if TYPE_CHECKING:
    from titanlite.ops.dropout import Dropout

MAX_LAYERS = 10_000


@dataclass(frozen=True, kw_only=True)
class LayerAttention:
    """What the attention of a layer sees, or that it has a state instead."""

    window: int | None = None
    """Tokens that a token sees, itself included. None: all before it."""
    rope: int | None = 0
    """Number of its rotary table in `DecoderArgs.ropes`. None: no positions (NoPE, arXiv:2305.19466)."""
    has_state: bool = False
    """The layer keeps a state of fixed size, and attends to nothing. In the place of a mask, it gets the documents,
    with the positions of all tokens of whole sequences; None without documents."""


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
        """Dims of a query or key of one attention head."""
        return self.dim // self.n_heads

    @property
    def rotary_dims(self) -> int:
        """Dims of a head that positions rotate: the first ones of `Attention`."""
        return self.head_size

    @property
    def ropes(self) -> tuple[Rope, ...]:
        """Rotary positions, one for each table that layers use."""
        return (Rope(theta=self.rope_theta),)

    def attention_of(self, layer: int) -> LayerAttention:
        """Return what the attention of a layer sees."""
        return LayerAttention()

    def __post_init__(self) -> None:
        for name in ("dim", "n_layers", "n_heads", "n_kv_heads", "hidden_dim", "vocab_size", "max_seq_len"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name, value in vars(self).items():
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"{name} must be finite, got {value}")
            if name.endswith("rope_theta") and value <= 0:
                raise ValueError(f"{name} must be more than 0, got {value}")
        if self.norm_eps < 0:
            raise ValueError(f"norm_eps must be at least 0, got {self.norm_eps}")
        if self.n_layers > MAX_LAYERS:  # a mistake in a file: building them would take hours
            raise ValueError(f"n_layers {self.n_layers:,} is more than {MAX_LAYERS:,}")
        if type(self).head_size is DecoderArgs.head_size and self.dim % (2 * self.n_heads):
            raise ValueError(f"dim {self.dim} must be a multiple of 2 x n_heads ({self.n_heads})")
        if self.n_heads % self.n_kv_heads:
            raise ValueError(f"n_heads {self.n_heads} must be a multiple of n_kv_heads {self.n_kv_heads}")


def unchanged(x: Tensor) -> Tensor:
    """Return x, where a block has no norm."""
    return x


class BlockNorms(NamedTuple):
    """Norms of a block, by their places."""

    before_attention: Callable[[Tensor], Tensor] = unchanged
    behind_attention: Callable[[Tensor], Tensor] = unchanged
    before_ffn: Callable[[Tensor], Tensor] = unchanged
    behind_ffn: Callable[[Tensor], Tensor] = unchanged


class Block(nn.Module):
    """One transformer block, with norms before its layers."""

    dropout: "Dropout | None" = None

    def __init__(self, args: DecoderArgs, *, attention: nn.Module, feed_forward: nn.Module) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(args.dim, eps=args.norm_eps)
        self.attention = attention
        self.ffn_norm = RMSNorm(args.dim, eps=args.norm_eps)
        self.feed_forward = feed_forward

    def forward(
        self,
        x_BLD: Tensor,
        cos_LH: Tensor,
        sin_LH: Tensor,
        mask: AttentionMask | None = None,
        draws_BL: Tensor | None = None,
        padding_BL: Tensor | None = None,
    ) -> Tensor:
        # The layers are called here, because the compiler cuts a block at the exchange of experts: a method around that
        # layer would be a graph of its own, whose norm would not be fused with the sum before it.
        norms = self.norms()
        attended_BLD = norms.behind_attention(self.attention(norms.before_attention(x_BLD), cos_LH, sin_LH, mask))
        x_BLD = x_BLD + self.dropped(attended_BLD, draws_BL, 0)
        padding = () if padding_BL is None else (padding_BL,)
        return x_BLD + self.dropped(norms.behind_ffn(self.feed_forward(norms.before_ffn(x_BLD), *padding)), draws_BL, 1)

    def norms(self) -> "BlockNorms":
        """Return the norms of the block."""
        return BlockNorms(before_attention=self.attention_norm, before_ffn=self.ffn_norm)

    def dropped(self, out_BLD: Tensor, draws_BL: Tensor | None, place: int) -> Tensor:
        """Return the output of a layer with dropout, if the block gets draws."""
        return out_BLD if draws_BL is None or self.dropout is None else self.dropout(out_BLD, draws_BL, place)


class Decoder(Model):
    """Decoder of Llama. Other families override the parts of its blocks and their costs."""

    tensor_plan = DECODER
    roles: ClassVar[Roles] = BRANCHES_OF_DECODER
    rope_cos: Tensor
    rope_sin: Tensor
    dropout: "Dropout | None" = None
    further_weight: float = 0.0
    """Weight of the loss of the token after the next. 0: it is not predicted."""
    norm_offset: ClassVar[float] = 0.0
    """RMSNorms of `layers` compute x * (offset + weight). Gemma stores weight - 1, so its offset is 1."""

    def __init__(self, args: DecoderArgs) -> None:
        super().__init__(args)
        self.args: DecoderArgs = args
        self.tok_embeddings = self.build_embedding()
        self.attentions = [args.attention_of(layer) for layer in range(args.n_layers)]
        self.layers = nn.ModuleList(self.build_block(layer) for layer in range(args.n_layers))
        self.head = Head(args.dim, args.vocab_size, args.norm_eps)
        if args.tied_head:
            self.head.output.weight = self.tok_embeddings.weight
        shape = len(args.ropes), args.max_seq_len, args.rotary_dims
        self.register_buffer("rope_cos", torch.empty(shape), persistent=False)
        self.register_buffer("rope_sin", torch.empty(shape), persistent=False)
        self._offset_norms()

    def _offset_norms(self) -> None:
        for module in self.modules():
            if type(module) is RMSNorm:
                module.offset = self.norm_offset

    def build_embedding(self) -> nn.Embedding:
        """Return the module whose output the first block takes."""
        return Embedding(self.args.vocab_size, self.args.dim)

    def build_block(self, layer: int) -> Block:
        attention, feed_forward = self.build_attention(layer), self.build_feed_forward(layer)
        return Block(self.args, attention=attention, feed_forward=feed_forward)

    def predict_further(self, weight: float) -> None:
        """Predict the token after the next, too, in passes that compute gradients of a loss.

        Args:
            weight: of its loss.
        """
        from titanlite.models.multi_token import FurtherToken  # few runs have it

        args, like = self.args, self.tok_embeddings.weight
        with like.device:
            further = FurtherToken(self.build_block(args.n_layers - 1), args.dim, args.norm_eps)
            # Of the head: behind experts in a block, its backward would recompute the block before theirs begins.
            norm = RMSNorm(args.dim, eps=args.norm_eps)
        self.layers.append(further.to(like.dtype))
        self.head.further_norm = norm.to(like.dtype)
        self.further_weight = weight
        self._offset_norms()

    def set_dropout(self, dropout: "Dropout") -> None:
        """Drop some of the hidden states in passes that get draws."""
        for module in self.modules():
            if isinstance(module, Block | Decoder):
                module.dropout = dropout

    def build_attention(self, layer: int) -> nn.Module:
        args, attention = self.args, self.attentions[layer]
        return Attention(
            args.dim,
            args.n_heads,
            args.n_kv_heads,
            args.head_size,
            rotates=attention.rope is not None,
            **self.attention_options(),
        )

    def attention_backend(self, kernels: Kernels, config: Config, device: torch.device) -> str:
        """Return the backend of attention; see `Kernels.attention_name`.

        Raises:
            UserError: the backend that the config names is not available.
        """
        args, options, training = self.args, self.attention_options(), config.training
        shortest = min(attention.window or training.seq_len for attention in self.attentions)
        return kernels.attention_name(
            n_heads=args.n_heads,
            n_kv_heads=args.n_kv_heads,
            head_dim=args.head_size,
            seq_len=training.seq_len,
            dtype=torch_dtype(training.mixed_precision_param),
            device=device,
            masked=config.data.document_mask or shortest < training.seq_len,
            has_sinks=options.get("has_sinks", False),
            in_parts=config.sequence_parts > 1,
        )

    def attention_options(self) -> dict[str, Any]:
        """Return the arguments of `Attention` that all layers of the family share."""
        return {}

    def attention_weights(self, layer: int) -> int:
        """Return how many weights of a block's attention a token is multiplied with."""
        args = self.args
        of_q = 3 if self.attention_options().get("has_gate") else 2
        return args.dim * args.head_size * (of_q * args.n_heads + 2 * args.n_kv_heads)

    def attention_dims(self, layer: int) -> int:
        """Return the dims of queries and values over all heads, which a token is multiplied with for each one that it
        sees."""
        return self.args.n_heads * 2 * self.args.head_size

    def build_feed_forward(self, layer: int) -> nn.Module:
        return FeedForward(self.args.dim, self.args.hidden_dim)

    def feed_forward_weights(self, layer: int) -> int:
        """Return how many weights of a block's feed-forward layer a token is multiplied with."""
        return 3 * self.args.dim * self.args.hidden_dim

    def forward(
        self,
        tokens: Tensor,
        loss: Loss | None = None,
        *,
        documents: Documents | None = None,
        further: Loss | None = None,
        draws: Tensor | None = None,
        padding: Tensor | None = None,
    ) -> Any:
        """See `Model.forward`.

        Args:
            further: loss of the tokens after the next. Then `tokens` are [B, L, 2]: with each is its next one.
            draws: int64 [B, L], number of each token in the run, with which dropout draws. None: nothing is dropped.
            padding: bool [B, L], tokens that experts do not count.
        """
        x_BLD = self.tok_embeddings(tokens)
        if further:
            from titanlite.models.multi_token import forward_of_pairs

            return forward_of_pairs(self, x_BLD, loss, further, documents, padding)
        inputs = self.block_inputs(x_BLD, documents, padding)
        if draws is not None and self.dropout:
            from titanlite.ops.dropout import draws_of_blocks  # few runs have it

            first, *of_blocks = draws_of_blocks(draws, len(inputs))
            x_BLD = self.dropout(x_BLD, first)
            inputs = [
                (*of_block[:3], draws_BL, *of_block[4:]) for of_block, draws_BL in zip(inputs, of_blocks, strict=True)
            ]
        return self.head(self.through_blocks(x_BLD, inputs), loss)

    def block_inputs(
        self, x_BLD: Tensor, documents: Documents | None, padding: Tensor | None = None
    ) -> list[tuple[Any, ...]]:
        """Return the further arguments of each block: cosines and sines of its rotary positions, and its mask; with
        experts and padding, these two more: no draws, and the padding."""
        seq_len = x_BLD.shape[1]
        ropes = [
            (rope_at(cos_SH, seq_len, documents), rope_at(sin_SH, seq_len, documents))
            for cos_SH, sin_SH in zip(self.rope_cos, self.rope_sin, strict=True)
        ]
        masks = self._masks(x_BLD, documents)
        return [(*ropes[attention.rope or 0], mask) for attention, mask in zip(self.attentions, masks, strict=True)]

    def through_blocks(self, x_BLD: Tensor, inputs: Sequence[tuple[Any, ...]]) -> Tensor:
        """Return the hidden states behind the blocks, of which a stage of a pipeline has some."""
        for name, block in self.layers.named_children():
            if (layer := int(name)) < len(inputs):
                x_BLD = block(x_BLD, *inputs[layer])
        return x_BLD

    def _masks(self, x_BLD: Tensor, documents: Documents | None) -> list[AttentionMask | Documents | None]:
        """Return the mask of each layer, which those with the same window share, or documents for its state. None:
        causal without a mask."""
        whole = x_BLD.shape[1] if documents is None else documents.ids_BS.shape[1]
        limits = [
            attention.window if attention.window is not None and attention.window < whole else None
            for attention in self.attentions
        ]
        masks: dict[int | None, AttentionMask | None] = dict.fromkeys(limits)
        for limit in masks:
            if documents is not None or limit is not None:
                masks[limit] = self.kernels.attention_mask(
                    documents, x_BLD, self.args.head_size, self.key_source, window=limit
                )
        whole_documents = None
        if documents is not None and any(attention.has_state for attention in self.attentions):
            part = None if self.key_source is None else self.key_source.part
            whole_documents = of_whole_sequences(documents, part)
        each = zip(self.attentions, limits, strict=True)
        return [whole_documents if attention.has_state else masks[limit] for attention, limit in each]

    def init_weight(self, name: str, shape: torch.Size) -> InitialValues:
        std = 0.02
        match name.split(".")[-2:]:
            case [_, "bias"]:
                return Constant(0.0)
            case [norm, "weight"] if norm.endswith("norm"):
                return LessOne(Constant(1.0)) if self.norm_offset else Constant(1.0)
            case [("wo" | "w2"), "weight"]:  # they add to the residual stream, once each a block (GPT-2)
                return Normal(std=std / (2 * self.args.n_layers) ** 0.5)
            case ["attention", "sinks"]:
                return Normal(std=std)
            case ["tok_embeddings", "weight"] if not self.args.tied_head:
                return Normal(std=1.0)
            case [("tok_embeddings" | "wq" | "wk" | "wv" | "w1" | "w3" | "join" | "output"), "weight"]:
                return Normal(std=std)
            case _:
                raise ValueError(f"no initial value is defined for parameter {name}")

    def init_buffers(self) -> None:
        args = self.args
        tables = [rope_cos_sin(args.rotary_dims, args.max_seq_len, rope) for rope in args.ropes]
        self.rope_cos, self.rope_sin = (torch.stack(several) for several in zip(*tables, strict=True))

    def flops_per_token(self, seq_len: int, *, causal: bool = False) -> float:
        """Floating point operations of forward and backward for one token; see `decoder_flops`."""
        return decoder_flops(self, seq_len, causal=causal)

    def share_of_experts(self) -> float:
        """Share of the experts that compute a token."""
        return 1.0
