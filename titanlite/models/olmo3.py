"""OLMo 3 (arXiv:2512.13961): windows in three of four layers, norms behind the layers, normalized queries and keys.

Norms of queries and keys are of all heads together. Layers with a window have plain rotary positions, and the others
those of YaRN.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from titanlite.models.base import DECODER, ModelArgs, Roles, TensorPlan
from titanlite.models.decoder import Block, BlockNorms, Decoder
from titanlite.models.decoder_formats import (
    HF_CONSTANTS,
    HF_DECODER,
    HF_FEED_FORWARD,
    HF_FIELDS,
    HF_QK_NORM,
    KINDS,
    check_head_dim,
    read_full_every,
    read_rope,
    write_layer_types,
)
from titanlite.models.formats import ConfigJson, Entry, Formats, HuggingFace, Table
from titanlite.models.layers import Rope, yarn_size
from titanlite.models.windows import WindowedArgs


def _yarn(factor: float) -> dict[str, Any]:
    """Return the constants of `Rope`, by their keys of config.json."""
    return {
        "original_max_position_embeddings": 8192, "beta_fast": 32, "beta_slow": 1, "truncate": True,
        "attention_factor": yarn_size(factor),
    }  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Olmo3Args(WindowedArgs):
    vocab_size: int = 100278
    max_seq_len: int = 65536
    norm_eps: float = 1e-6
    rope_theta: float = 500000.0
    rope_scaling_factor: float = 8.0
    window: int = 4096
    full_every: int = 4

    @property
    def ropes(self) -> tuple[Rope, ...]:
        scaled = Rope(theta=self.rope_theta, factor=self.rope_scaling_factor, scaling="yarn")
        return Rope(theta=self.rope_theta), scaled


class PostNormBlock(Block):
    """Block whose norms are behind its layers (arXiv:2501.00656)."""

    def norms(self) -> BlockNorms:
        return BlockNorms(behind_attention=self.attention_norm, behind_ffn=self.ffn_norm)


def _write_rest(args: Olmo3Args) -> ConfigJson:
    factor, theta = args.rope_scaling_factor, {"rope_theta": args.rope_theta}
    scaling = {"rope_type": "yarn", "factor": factor, **_yarn(factor)} if factor != 1 else None
    by_kind = {KINDS[False]: {"rope_type": "default", **theta}, KINDS[True]: {"rope_type": "default", **theta}}
    if scaling:
        by_kind[KINDS[True]] |= scaling
    # transformers before version 5 reads the first two, and later versions the third.
    ropes = {**theta, "rope_scaling": scaling, "rope_parameters": by_kind}
    return {**ropes, "layer_types": write_layer_types(args), "pad_token_id": None}


def _read_rest(config: ConfigJson) -> dict[str, Any]:
    check_head_dim(config)
    full = read_rope(config, KINDS[True], scaling="yarn", constants=_yarn)
    theta, local = full["rope_theta"], read_rope(config, KINDS[False])["rope_theta"]
    if theta != local:
        raise ValueError(f"rope_theta {local} of layers with a window is not supported beside {theta} of others")
    return {"rope_theta": theta, "rope_scaling_factor": full["factor"], "full_every": read_full_every(config)}


HF_NORMS = (
    Entry("layers.{layer}.attention_norm.weight", "model.layers.{layer}.post_attention_layernorm.weight"),
    Entry("layers.{layer}.ffn_norm.weight", "model.layers.{layer}.post_feedforward_layernorm.weight"),
)
HF_REST = tuple(entry for entry in HF_DECODER if entry.ours not in {norm.ours for norm in HF_NORMS})


class Olmo3(Decoder):
    draws_random = False
    roles: ClassVar[Roles] = {"layers.*.attention_norm.weight": "residual", "layers.*.ffn_norm.weight": "residual"}
    tensor_plan: ClassVar[TensorPlan] = {"layers.*.attention.[qk]_norm": "norm", **DECODER}
    formats = Formats(
        hugging_face=HuggingFace(
            architecture="Olmo3ForCausalLM",
            model_type="olmo3",
            tensors=Table(HF_REST + HF_NORMS + HF_QK_NORM + HF_FEED_FORWARD),
            fields={**HF_FIELDS, "window": "sliding_window"},
            constants=HF_CONSTANTS,
            write_rest=_write_rest,
            read_rest=_read_rest,
        ),
    )
    flavors: ClassVar[dict[str, ModelArgs]] = {
        "debug": Olmo3Args(
            dim=256, n_layers=4, n_heads=4, n_kv_heads=2, hidden_dim=768, vocab_size=2048, max_seq_len=8192,
            rope_theta=10000.0, rope_scaling_factor=1.0, window=64,
        ),
        "7B": Olmo3Args(dim=4096, n_layers=32, n_heads=32, n_kv_heads=32, hidden_dim=11008),
        "32B": Olmo3Args(dim=5120, n_layers=64, n_heads=40, n_kv_heads=8, hidden_dim=27648),
    }  # fmt: skip

    args: Olmo3Args  # pyright: ignore[reportIncompatibleVariableOverride]

    def build_block(self, layer: int) -> Block:
        attention, feed_forward = self.build_attention(layer), self.build_feed_forward(layer)
        return PostNormBlock(self.args, attention=attention, feed_forward=feed_forward)

    def attention_options(self) -> dict[str, Any]:
        return {"qk_norm_eps": self.args.norm_eps, "norms_heads": False}
