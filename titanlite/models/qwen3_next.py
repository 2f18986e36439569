"""Qwen3-Next (https://qwenlm.github.io/blog/qwen3_next/): of four layers, three are Gated DeltaNets and one attends.

Attention has a gate of its output and rotates a part of each head. All layers have experts, and a shared one with a
gate. Norms multiply by 1 + weight, but for those of Gated DeltaNets.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from titanlite.models.base import ModelArgs, Roles, TensorPlan
from titanlite.models.decoder import LayerAttention
from titanlite.models.decoder_formats import (
    HF_CONSTANTS,
    HF_DECODER,
    HF_EXPERTS,
    HF_FIELDS,
    HF_QK_NORM,
    read_full_every,
    read_partial_rope,
    write_layer_types,
    write_partial_rope,
)
from titanlite.models.delta_net import GatedDeltaNet
from titanlite.models.experts import DecoderOfExperts, ExpertArgs, ExpertOptions
from titanlite.models.formats import ConfigJson, Entry, Formats, HuggingFace, Table
from titanlite.models.initial import Constant, InitialValues, Normal, Uniform
from titanlite.models.qwen3 import PartlyRotatedArgs


@dataclass(frozen=True, kw_only=True)
class Qwen3NextArgs(PartlyRotatedArgs, ExpertArgs):
    """hidden_dim is that of one expert."""

    head_dim: int = 256
    max_seq_len: int = 262144
    rope_theta: float = 1e7
    rotary_factor: float = 0.25
    full_every: int = 4
    """Of each so many layers, the last attends, and the others are Gated DeltaNets."""
    n_linear_key_heads: int = 16
    """Heads of queries and keys of a Gated DeltaNet."""
    n_linear_value_heads: int = 32
    """Heads of values of a Gated DeltaNet; several can share a key head."""
    linear_key_dim: int = 128
    """Dims of a query or key of one of its heads."""
    linear_value_dim: int = 128
    """Dims of a value of one of its heads."""
    conv_size: int = 4
    """Tokens that its convolutions see."""
    n_experts: int = 512
    n_active_experts: int = 10
    shared_hidden_dim: int = 512
    """Hidden dim of the shared expert."""
    balance_rate: float = 5e-3
    """Change of an expert's bias in a step, in units of the router's logits; 0 turns balancing off."""

    @property
    def experts(self) -> ExpertOptions:
        return ExpertOptions(shared_dim=self.shared_hidden_dim, shared_has_gate=True)

    def attention_of(self, layer: int) -> LayerAttention:
        return LayerAttention() if (layer + 1) % self.full_every == 0 else LayerAttention(rope=None, has_state=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, least in {
            "full_every": 1, "n_linear_key_heads": 1, "linear_key_dim": 1, "linear_value_dim": 1, "conv_size": 2,
            "shared_hidden_dim": 1,
        }.items():  # fmt: skip
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")
        keys, values = self.n_linear_key_heads, self.n_linear_value_heads
        if values < 1 or values % keys:
            raise ValueError(f"n_linear_value_heads {values} must be a multiple of n_linear_key_heads {keys}")

    def resized(self, *, width: int, depth: int) -> "Qwen3NextArgs":
        """Change the numbers of heads of Gated DeltaNets in proportion to the width as well."""
        resized = super().resized(width=width, depth=depth)
        assert isinstance(resized, Qwen3NextArgs)
        names = "n_linear_key_heads", "n_linear_value_heads"
        return replace(resized, **{name: getattr(self, name) * width // self.dim for name in names})


def _write_rest(args: Qwen3NextArgs) -> ConfigJson:
    layers = {"layer_types": write_layer_types(args), "full_attention_interval": args.full_every}
    # transformers wants the size of dense feed-forward layers, of which these models have none.
    return {**write_partial_rope(args), **layers, "intermediate_size": args.hidden_dim}


def _read_rest(config: ConfigJson) -> dict[str, Any]:
    return {**read_partial_rope(config), "full_every": read_full_every(config, other="linear_attention")}


LINEAR_NAMES = {
    "qkvz.weight": "in_proj_qkvz.weight", "ba.weight": "in_proj_ba.weight", "conv": "conv1d.weight", "a_log": "A_log",
    "dt_bias": "dt_bias", "norm.weight": "norm.weight", "out.weight": "out_proj.weight",
}  # fmt: skip
SHARED_NAMES = {
    "shared_gate": "shared_expert_gate.weight", "shared.w1.weight": "shared_expert.gate_proj.weight",
    "shared.w2.weight": "shared_expert.down_proj.weight", "shared.w3.weight": "shared_expert.up_proj.weight",
}  # fmt: skip
HF_REST = (
    *(
        Entry(f"layers.{{layer}}.attention.{ours}", f"model.layers.{{layer}}.linear_attn.{theirs}")
        for ours, theirs in LINEAR_NAMES.items()
    ),
    *(
        Entry(f"layers.{{layer}}.feed_forward.{ours}", f"model.layers.{{layer}}.mlp.{theirs}")
        for ours, theirs in SHARED_NAMES.items()
    ),
)
HF_FURTHER = {
    "layers.{layer}.next_norm.weight": "mtp.pre_fc_norm_embedding.weight",
    "layers.{layer}.hidden_norm.weight": "mtp.pre_fc_norm_hidden.weight",
    "layers.{layer}.join.weight": "mtp.fc.weight",
    "layers.{layer}.block.": "mtp.layers.0.",
    "head.further_norm.weight": "mtp.norm.weight",
}


@dataclass(frozen=True)
class LogUniform(InitialValues):
    """Logarithms of values that are uniform between two."""

    low: float
    high: float

    def values(self, bits: Tensor, indices: Tensor) -> Tensor:
        # float32 hides that the last bits of log differ between devices.
        return Uniform(low=self.low, high=self.high).values(bits, indices).log().float()


class Qwen3Next(DecoderOfExperts):
    draws_random = False
    norm_offset = 1.0
    roles: ClassVar[Roles] = {"layers.*.attention.out.weight": "residual", **DecoderOfExperts.roles}
    formats = Formats(
        hugging_face=HuggingFace(
            architecture="Qwen3NextForCausalLM",
            model_type="qwen3_next",
            tensors=Table(HF_DECODER + HF_QK_NORM + HF_EXPERTS + HF_REST, HF_FURTHER),
            fields={
                **HF_FIELDS,
                "head_dim": "head_dim",
                "hidden_dim": "moe_intermediate_size",
                "shared_hidden_dim": "shared_expert_intermediate_size",
                "n_experts": "num_experts",
                "n_active_experts": "num_experts_per_tok",
                "n_linear_key_heads": "linear_num_key_heads",
                "n_linear_value_heads": "linear_num_value_heads",
                "linear_key_dim": "linear_key_head_dim",
                "linear_value_dim": "linear_value_head_dim",
                "conv_size": "linear_conv_kernel_dim",
            },
            constants={**HF_CONSTANTS, "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True},
            write_rest=_write_rest,
            read_rest=_read_rest,
        ),
    )
    flavors: ClassVar[dict[str, ModelArgs]] = {
        "debug": Qwen3NextArgs(
            dim=256, n_layers=4, n_heads=4, n_kv_heads=2, hidden_dim=192, head_dim=64, vocab_size=2048,
            max_seq_len=8192, rope_theta=10000.0, n_linear_key_heads=2, n_linear_value_heads=4, linear_key_dim=32,
            linear_value_dim=64, n_experts=8, n_active_experts=2, shared_hidden_dim=192, balance_rate=0.05,
        ),
        "80B-A3B": Qwen3NextArgs(dim=2048, n_layers=48, n_heads=16, n_kv_heads=2, hidden_dim=512),
    }  # fmt: skip

    args: Qwen3NextArgs  # pyright: ignore[reportIncompatibleVariableOverride]

    @property
    def tensor_plan(self) -> TensorPlan:  # pyright: ignore[reportIncompatibleVariableOverride]
        if not any(attention.has_state for attention in self.attentions):
            return super().tensor_plan
        return {
            **super().tensor_plan,
            "layers.*.attention.qkvz": "columns",
            "layers.*.attention.ba": "columns",
            "layers.*.attention.out": "rows",
        }

    def build_attention(self, layer: int) -> nn.Module:
        args = self.args
        if not self.attentions[layer].has_state:
            return super().build_attention(layer)
        return GatedDeltaNet(
            args.dim,
            n_key_heads=args.n_linear_key_heads,
            n_value_heads=args.n_linear_value_heads,
            key_dim=args.linear_key_dim,
            value_dim=args.linear_value_dim,
            conv_size=args.conv_size,
            norm_eps=args.norm_eps,
        )

    def attention_options(self) -> dict[str, Any]:
        return {"qk_norm_eps": self.args.norm_eps, "has_gate": True}

    def attention_weights(self, layer: int) -> int:
        args = self.args
        if not self.attentions[layer].has_state:
            return super().attention_weights(layer)
        keys, heads = args.n_linear_key_heads * args.linear_key_dim, args.n_linear_value_heads
        # A token reads its state by its key and its query, and adds to it, as if that were three matrices of weights.
        states = 3 * heads * args.linear_key_dim * args.linear_value_dim
        return args.dim * (2 * keys + 3 * heads * args.linear_value_dim + 2 * heads) + states

    def attention_dims(self, layer: int) -> int:
        return 0 if self.attentions[layer].has_state else super().attention_dims(layer)

    def init_weight(self, name: str, shape: torch.Size) -> InitialValues:
        match name.partition(".attention.")[2]:
            case "norm.weight" | "dt_bias":
                return Constant(1.0)
            case "a_log":
                return LogUniform(0.01, 16.0)
            case "conv":
                return Uniform(low=-(shape[-1] ** -0.5), high=shape[-1] ** -0.5)
            case "qkvz.weight" | "ba.weight":
                return Normal(std=0.02)
            case "out.weight":
                return super().init_weight(f"{name.removesuffix('out.weight')}wo.weight", shape)
        return super().init_weight(name, shape)
