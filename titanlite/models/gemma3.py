"""Gemma 3, text only (arXiv:2503.19786): windows in five of six layers, norms before and behind layers, GeGLU.

Layers with a window have a rotary base of their own. Norms multiply by 1 + weight, and embeddings are multiplied by
sqrt(dim).
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from titanlite.models.base import DECODER, ModelArgs, Roles, TensorPlan
from titanlite.models.decoder import Block, BlockNorms, Decoder
from titanlite.models.decoder_formats import (
    HF_DECODER,
    HF_FEED_FORWARD,
    HF_FIELDS,
    HF_QK_NORM,
    KINDS,
    read_full_every,
    read_rope,
    write_layer_types,
)
from titanlite.models.formats import ConfigJson, Entry, Formats, HuggingFace, Table
from titanlite.models.layers import Embedding, FeedForward, RMSNorm, Rope, geglu, linear_of_each
from titanlite.models.qwen3 import Qwen3Args
from titanlite.models.windows import WindowedArgs


@dataclass(frozen=True, kw_only=True)
class Gemma3Args(Qwen3Args, WindowedArgs):
    head_dim: int = 256
    vocab_size: int = 262208
    max_seq_len: int = 131072
    tied_head: bool = True
    rope_scaling_factor: float = 8.0
    """Factor of all wavelengths in layers without a window."""
    local_rope_theta: float = 10000.0
    """Rotary base of layers with a window."""
    window: int = 1024
    full_every: int = 6
    query_pre_attn_scalar: int = 256
    """Scores are divided by its square root."""

    @property
    def ropes(self) -> tuple[Rope, ...]:
        scaled = Rope(theta=self.rope_theta, factor=self.rope_scaling_factor, scaling="linear")
        return Rope(theta=self.local_rope_theta), scaled

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.query_pre_attn_scalar < 1:
            raise ValueError(f"query_pre_attn_scalar must be at least 1, got {self.query_pre_attn_scalar}")


class ScaledEmbedding(Embedding):
    """Embedding whose vectors are multiplied by sqrt(dim), rounded to their dtype as the released weights expect."""

    def __init__(self, vocab_size: int, dim: int) -> None:
        super().__init__(vocab_size, dim)
        self.scale = dim**0.5

    def forward(self, input: Tensor) -> Tensor:
        x_BLD = super().forward(input)
        return x_BLD * torch.tensor(self.scale, dtype=x_BLD.dtype)


class GeGLU(FeedForward):
    """GeGLU (arXiv:2002.05202): w2(gelu(w1 x) * w3 x)."""

    def forward(self, x_BLD: Tensor) -> Tensor:
        return self.w2(geglu(*linear_of_each(x_BLD, self.w1, self.w3)))


class SandwichBlock(Block):
    """Block with norms before and behind its layers."""

    def __init__(self, args: Gemma3Args, *, attention: nn.Module, feed_forward: nn.Module) -> None:
        super().__init__(args, attention=attention, feed_forward=feed_forward)
        self.post_attention_norm = RMSNorm(args.dim, eps=args.norm_eps)
        self.post_ffn_norm = RMSNorm(args.dim, eps=args.norm_eps)

    def norms(self) -> BlockNorms:
        return BlockNorms(self.attention_norm, self.post_attention_norm, self.ffn_norm, self.post_ffn_norm)


def _write_rest(args: Gemma3Args) -> ConfigJson:
    factor, theta, local = args.rope_scaling_factor, args.rope_theta, args.local_rope_theta
    scaling = {"rope_type": "linear", "factor": factor} if factor != 1 else None
    by_kind = {
        KINDS[False]: {"rope_type": "default", "rope_theta": local},
        KINDS[True]: {"rope_type": "default", "rope_theta": theta, **(scaling or {})},
    }
    # transformers before version 5 reads the first three, and later versions the fourth.
    ropes = {"rope_theta": theta, "rope_local_base_freq": local, "rope_scaling": scaling, "rope_parameters": by_kind}
    # transformers' default for padding is a token, whose embedding would not be trained.
    return {**ropes, "layer_types": write_layer_types(args), "pad_token_id": None}


def _read_rest(config: ConfigJson) -> dict[str, Any]:
    full = read_rope(config, KINDS[True], scaling="linear")
    return {
        "rope_theta": full["rope_theta"],
        "local_rope_theta": read_rope(config, KINDS[False])["rope_theta"],
        "rope_scaling_factor": full["factor"],
        "full_every": read_full_every(config),
    }


HF_NORMS = (
    Entry("layers.{layer}.post_attention_norm.weight", "model.layers.{layer}.post_attention_layernorm.weight"),
    Entry("layers.{layer}.ffn_norm.weight", "model.layers.{layer}.pre_feedforward_layernorm.weight"),
    Entry("layers.{layer}.post_ffn_norm.weight", "model.layers.{layer}.post_feedforward_layernorm.weight"),
)
HF_REST = tuple(entry for entry in HF_DECODER if entry.ours != "layers.{layer}.ffn_norm.weight")


class Gemma3(Decoder):
    draws_random = False
    norm_offset = 1.0
    roles: ClassVar[Roles] = {"layers.*.post_*_norm.weight": "residual"}
    tensor_plan: ClassVar[TensorPlan] = DECODER
    formats = Formats(
        hugging_face=HuggingFace(
            architecture="Gemma3ForCausalLM",
            model_type="gemma3_text",
            tensors=Table(HF_REST + HF_NORMS + HF_QK_NORM + HF_FEED_FORWARD),
            fields={
                **HF_FIELDS,
                "head_dim": "head_dim",
                "window": "sliding_window",
                "query_pre_attn_scalar": "query_pre_attn_scalar",
            },
            constants={
                "hidden_activation": "gelu_pytorch_tanh",
                "attention_bias": False,
                "attention_dropout": 0.0,
                "attn_logit_softcapping": None,
                "final_logit_softcapping": None,
                "use_bidirectional_attention": False,
            },
            write_rest=_write_rest,
            read_rest=_read_rest,
        ),
    )
    flavors: ClassVar[dict[str, ModelArgs]] = {
        "debug": Gemma3Args(
            dim=256, n_layers=6, n_heads=4, n_kv_heads=2, hidden_dim=768, head_dim=96, vocab_size=2048,
            max_seq_len=8192, rope_scaling_factor=1.0, window=64, query_pre_attn_scalar=96,
        ),
        "270M": Gemma3Args(
            dim=640, n_layers=18, n_heads=4, n_kv_heads=1, hidden_dim=2048, vocab_size=262144, max_seq_len=32768,
            rope_scaling_factor=1.0, window=512,
        ),
        "1B": Gemma3Args(
            dim=1152, n_layers=26, n_heads=4, n_kv_heads=1, hidden_dim=6912, vocab_size=262144, max_seq_len=32768,
            rope_scaling_factor=1.0, window=512,
        ),
        "4B": Gemma3Args(dim=2560, n_layers=34, n_heads=8, n_kv_heads=4, hidden_dim=10240),
        "12B": Gemma3Args(dim=3840, n_layers=48, n_heads=16, n_kv_heads=8, hidden_dim=15360),
        "27B": Gemma3Args(
            dim=5376, n_layers=62, n_heads=32, n_kv_heads=16, hidden_dim=21504, head_dim=128, query_pre_attn_scalar=168,
        ),
    }  # fmt: skip

    args: Gemma3Args  # pyright: ignore[reportIncompatibleVariableOverride]

    def build_embedding(self) -> nn.Embedding:
        return ScaledEmbedding(self.args.vocab_size, self.args.dim)

    def build_block(self, layer: int) -> Block:
        attention, feed_forward = self.build_attention(layer), self.build_feed_forward(layer)
        return SandwichBlock(self.args, attention=attention, feed_forward=feed_forward)

    def attention_options(self) -> dict[str, Any]:
        return {"qk_norm_eps": self.args.norm_eps, "scale": self.args.query_pre_attn_scalar**-0.5}

    def build_feed_forward(self, layer: int) -> nn.Module:
        return GeGLU(self.args.dim, self.args.hidden_dim)
