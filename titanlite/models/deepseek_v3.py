"""DeepSeek-V3 (arXiv:2412.19437), and models of the same architecture: Moonlight (arXiv:2502.16982), Kimi K2
(arXiv:2507.20534).

Queries, keys and values come from latent vectors. Experts follow a few dense layers. One of them, which may be as wide
as several, computes every token.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import nn

from titanlite.models.base import ModelArgs
from titanlite.models.decoder_formats import (
    HF_CONSTANTS,
    HF_DECODER,
    HF_FURTHER,
    HF_GROUPED_EXPERTS,
    HF_GROUPED_FIELDS,
    read_rope,
    write_plain_rope,
)
from titanlite.models.experts import DecoderOfExperts, ExpertOptions, GroupedExpertArgs
from titanlite.models.formats import ConfigJson, Entry, Formats, HuggingFace, Table
from titanlite.models.initial import InitialValues, Normal
from titanlite.models.layers import Rope, yarn_size
from titanlite.models.mla import LatentAttention
from titanlite.runtime.errors import UserError

YARN = {
    "original_max_position_embeddings": 4096, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0, "truncate": True,
    "attention_factor": 1.0,
}  # fmt: skip
"""Constants of the rotary positions, by their keys of config.json."""


@dataclass(frozen=True, kw_only=True)
class DeepseekV3Args(GroupedExpertArgs):
    """hidden_dim is that of one expert. Heads share no keys, so that n_kv_heads is n_heads."""

    vocab_size: int = 129280
    max_seq_len: int = 163840
    norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling_factor: float = 40.0
    rope_most_turns: float = 32.0
    """`Rope.beta_fast`."""
    q_rank: int = 1536
    """Dims of the latent vector of queries. 0: queries come from the layer's input."""
    kv_rank: int = 512
    """Dims of the latent vector of keys and values."""
    nope_dim: int = 128
    """Dims of a query or key without positions."""
    rope_dim: int = 64
    """Dims of a query or key with positions."""
    v_dim: int = 128
    """Dims of a value."""
    n_experts: int = 256
    n_active_experts: int = 8
    n_groups: int = 8
    n_active_groups: int = 4
    routed_scaling_factor: float = 2.5
    n_dense_layers: int = 3
    dense_hidden_dim: int = 18432
    softmax_scores: bool = False
    """Weigh a token's experts by their shares of a softmax over all, as DeepSeek-V2 (arXiv:2405.04434), and not by
    sigmoids that are scaled to a sum of 1."""

    @property
    def experts(self) -> ExpertOptions:
        options = super().experts
        return replace(options, scores="softmax", normalized=False) if self.softmax_scores else options

    @property
    def head_size(self) -> int:
        return self.nope_dim + self.rope_dim

    @property
    def rotary_dims(self) -> int:
        return self.rope_dim

    @property
    def ropes(self) -> tuple[Rope, ...]:
        # yarn makes all dims of the scores sharper, see `build_attention`, and not those with positions alone
        return (
            Rope(
                theta=self.rope_theta, factor=self.rope_scaling_factor, original_seq_len=4096, scaling="yarn",
                beta_fast=self.rope_most_turns, mscale=False,
            ),
        )  # fmt: skip

    def __post_init__(self) -> None:
        if self.softmax_scores and self.n_groups > 1:
            raise ValueError(f"n_groups must be 1 with softmax_scores, got {self.n_groups}")
        super().__post_init__()
        for name in ("kv_rank", "nope_dim", "v_dim", "n_shared_experts", "rope_scaling_factor"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.q_rank < 0:
            raise ValueError(f"q_rank must be at least 0, got {self.q_rank}")
        if self.rope_dim < 2 or self.rope_dim % 2:
            raise ValueError(f"rope_dim must be a multiple of 2, got {self.rope_dim}")
        if self.v_dim > self.head_size:
            raise ValueError(f"v_dim {self.v_dim} must be at most nope_dim + rope_dim ({self.head_size})")
        if self.n_kv_heads != self.n_heads:
            raise ValueError(f"n_kv_heads {self.n_kv_heads} must be n_heads ({self.n_heads})")

    def resized(self, *, width: int, depth: int) -> "DeepseekV3Args":
        """Resize latent vectors and dense layers in proportion to the width as well."""
        resized = super().resized(width=width, depth=depth)
        assert isinstance(resized, DeepseekV3Args)
        names = "q_rank", "kv_rank", "dense_hidden_dim"
        return replace(resized, **{name: round(getattr(self, name) * width / self.dim) for name in names})


def _write_rest(args: DeepseekV3Args) -> ConfigJson:
    if args.softmax_scores:
        raise UserError("model.args.softmax_scores: transformers has no such model, so that it cannot be exported")
    rope = write_plain_rope(args)
    if args.rope_scaling_factor != 1:
        yarn = {"rope_type": "yarn", "factor": args.rope_scaling_factor, "beta_fast": args.rope_most_turns, **YARN}
        rope["rope_scaling"] = yarn
    return {**rope, "q_lora_rank": args.q_rank or None, "num_nextn_predict_layers": 0}


def _read_rest(config: ConfigJson) -> dict[str, Any]:
    rope_dim = config["qk_rope_head_dim"]
    if config.get("head_dim", rope_dim) != rope_dim:  # transformers rotates as many dims
        raise ValueError(f"head_dim {config['head_dim']} is not supported, only that of qk_rope_head_dim")
    rope = read_rope(config, scaling="yarn", constants=lambda factor: YARN, free=["beta_fast"])
    turns = {"rope_most_turns": float(rope["beta_fast"])} if "beta_fast" in rope else {}
    theta, factor = rope["rope_theta"], rope["factor"]
    return {"rope_theta": theta, "rope_scaling_factor": factor, **turns, "q_rank": config["q_lora_rank"] or 0}


LATENT_NAMES = {
    "q_a": "q_a_proj", "q_norm": "q_a_layernorm", "wq_b": "q_b_proj", "kv_a": "kv_a_proj_with_mqa",
    "kv_norm": "kv_a_layernorm", "wkv_b": "kv_b_proj",
}  # fmt: skip
HF_LATENT = tuple(
    Entry(f"layers.{{layer}}.attention.{ours}.weight", f"model.layers.{{layer}}.self_attn.{theirs}.weight")
    for ours, theirs in LATENT_NAMES.items()
)


class DeepseekV3(DecoderOfExperts):
    draws_random = False
    formats = Formats(
        hugging_face=HuggingFace(
            architecture="DeepseekV3ForCausalLM",
            model_type="deepseek_v3",
            other_types=("kimi_k2",),
            tensors=Table(HF_DECODER + HF_LATENT + HF_GROUPED_EXPERTS, HF_FURTHER),
            fields={
                **HF_GROUPED_FIELDS,
                "kv_rank": "kv_lora_rank",
                "nope_dim": "qk_nope_head_dim",
                "rope_dim": "qk_rope_head_dim",
                "v_dim": "v_head_dim",
            },
            constants={
                **HF_CONSTANTS,
                "rope_interleave": True,
                "norm_topk_prob": True,
                "scoring_func": "sigmoid",
                "topk_method": "noaux_tc",
                "moe_layer_freq": 1,
            },
            write_rest=_write_rest,
            read_rest=_read_rest,
        ),
    )

    flavors: ClassVar[dict[str, ModelArgs]] = {
        "debug": DeepseekV3Args(
            dim=256, n_layers=4, n_heads=4, n_kv_heads=4, hidden_dim=192, vocab_size=2048, max_seq_len=8192,
            rope_scaling_factor=1.0, q_rank=96, kv_rank=64, nope_dim=32, rope_dim=32, v_dim=48, n_experts=8,
            n_active_experts=2, n_groups=2, n_active_groups=1, n_dense_layers=1, dense_hidden_dim=768,
            balance_rate=0.01,
        ),
        "Moonlight-16B-A3B": DeepseekV3Args(
            dim=2048, n_layers=27, n_heads=16, n_kv_heads=16, hidden_dim=1408, vocab_size=163840, max_seq_len=8192,
            norm_eps=1e-5, rope_theta=50000.0, rope_scaling_factor=1.0, q_rank=0, n_experts=64, n_active_experts=6,
            n_shared_experts=2, n_groups=1, n_active_groups=1, routed_scaling_factor=2.446, n_dense_layers=1,
            dense_hidden_dim=11264,
        ),
        "671B": DeepseekV3Args(dim=7168, n_layers=61, n_heads=128, n_kv_heads=128, hidden_dim=2048),
        "Kimi-K2": DeepseekV3Args(
            dim=7168, n_layers=61, n_heads=64, n_kv_heads=64, hidden_dim=2048, vocab_size=163840, max_seq_len=131072,
            rope_theta=50000.0, rope_scaling_factor=32.0, rope_most_turns=1.0, n_experts=384, n_groups=1,
            n_active_groups=1, routed_scaling_factor=2.827, n_dense_layers=1,
        ),
    }  # fmt: skip

    args: DeepseekV3Args  # pyright: ignore[reportIncompatibleVariableOverride]

    def build_attention(self, layer: int) -> nn.Module:
        args = self.args
        return LatentAttention(
            args.dim,
            args.n_heads,
            q_rank=args.q_rank or None,
            kv_rank=args.kv_rank,
            nope_dim=args.nope_dim,
            rope_dim=args.rope_dim,
            v_dim=args.v_dim,
            scale=yarn_size(args.rope_scaling_factor) ** 2 / args.head_size**0.5,
        )

    def attention_weights(self, layer: int) -> int:
        args = self.args
        of_q, of_kv = args.n_heads * args.head_size, args.n_heads * (args.nope_dim + args.v_dim)
        queries = args.q_rank * (args.dim + of_q) if args.q_rank else args.dim * of_q
        keys = args.dim * (args.kv_rank + args.rope_dim) + args.kv_rank * of_kv
        return queries + keys + args.n_heads * args.v_dim * args.dim

    def attention_dims(self, layer: int) -> int:
        return self.args.n_heads * (self.args.head_size + self.args.v_dim)

    def init_weight(self, name: str, shape: torch.Size) -> InitialValues:
        is_latent = name.split(".")[-2] in ("q_a", "kv_a", "wq_b", "wkv_b")
        return Normal(std=0.02) if is_latent else super().init_weight(name, shape)
