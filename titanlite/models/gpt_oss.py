"""gpt-oss (arXiv:2508.10925): experts with biases, attention with sinks and biases, windows in every second layer."""

from dataclasses import dataclass
from typing import Any, ClassVar

from titanlite.models.base import ModelArgs
from titanlite.models.decoder_formats import (
    HF_BIASES,
    HF_CONSTANTS,
    HF_DECODER,
    HF_FIELDS,
    read_full_every,
    read_rope,
    write_layer_types,
)
from titanlite.models.experts import DecoderOfExperts, ExpertArgs, ExpertOptions
from titanlite.models.formats import ConfigJson, Entry, Formats, HuggingFace, Table
from titanlite.models.layers import Rope, yarn_size
from titanlite.models.qwen3 import Qwen3Args
from titanlite.models.windows import WindowedArgs
from titanlite.ops.functions import clamped_swiglu

ORIGINAL_SEQ_LEN = 4096


def _yarn(factor: float) -> dict[str, Any]:
    """Return the constants of `Rope`, by their keys of config.json."""
    return {
        "original_max_position_embeddings": ORIGINAL_SEQ_LEN, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
        "attention_factor": yarn_size(factor),
    }  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class GptOssArgs(Qwen3Args, ExpertArgs, WindowedArgs):
    """hidden_dim is that of one expert."""

    head_dim: int = 64
    vocab_size: int = 201088
    max_seq_len: int = 131072
    norm_eps: float = 1e-5
    rope_theta: float = 150000.0
    rope_scaling_factor: float = 32.0
    window: int = 128
    full_every: int = 2
    n_experts: int = 128
    n_active_experts: int = 4
    balance_rate: float = 5e-3
    """Change of an expert's bias in a step, in units of the router's logits; 0 turns balancing off."""

    @property
    def ropes(self) -> tuple[Rope, ...]:
        return (
            Rope(
                theta=self.rope_theta,
                factor=self.rope_scaling_factor,
                original_seq_len=ORIGINAL_SEQ_LEN,
                scaling="yarn",
                truncate=False,
            ),
        )

    @property
    def experts(self) -> ExpertOptions:
        return ExpertOptions(router_has_bias=True, have_biases=True, activation=clamped_swiglu)


def _write_rest(args: GptOssArgs) -> ConfigJson:
    factor, theta = args.rope_scaling_factor, {"rope_theta": args.rope_theta}
    scaling = {"rope_type": "yarn", "factor": factor, **_yarn(factor)} if factor != 1 else None
    # transformers before version 5 reads the first two, and later versions the third.
    ropes = {**theta, "rope_scaling": scaling, "rope_parameters": {"rope_type": "default", **theta, **(scaling or {})}}
    return {**ropes, "layer_types": write_layer_types(args)}


def _read_rest(config: ConfigJson) -> dict[str, Any]:
    rope = read_rope(config, scaling="yarn", constants=_yarn)
    theta, factor = rope["rope_theta"], rope["factor"]
    return {"rope_theta": theta, "rope_scaling_factor": factor, "full_every": read_full_every(config)}


HF_REST = (
    Entry("layers.{layer}.attention.sinks", "model.layers.{layer}.self_attn.sinks"),
    Entry("layers.{layer}.feed_forward.router", "model.layers.{layer}.mlp.router.weight"),
    Entry("layers.{layer}.feed_forward.router_bias", "model.layers.{layer}.mlp.router.bias"),
    Entry("layers.{layer}.feed_forward.w1", "model.layers.{layer}.mlp.experts.gate_up_proj", column=0),
    Entry("layers.{layer}.feed_forward.w3", "model.layers.{layer}.mlp.experts.gate_up_proj", column=1),
    Entry("layers.{layer}.feed_forward.w2", "model.layers.{layer}.mlp.experts.down_proj"),
    Entry("layers.{layer}.feed_forward.b1", "model.layers.{layer}.mlp.experts.gate_up_proj_bias", column=0),
    Entry("layers.{layer}.feed_forward.b3", "model.layers.{layer}.mlp.experts.gate_up_proj_bias", column=1),
    Entry("layers.{layer}.feed_forward.b2", "model.layers.{layer}.mlp.experts.down_proj_bias"),
)


class GptOss(DecoderOfExperts):
    draws_random = False
    formats = Formats(
        hugging_face=HuggingFace(
            architecture="GptOssForCausalLM",
            model_type="gpt_oss",
            tensors=Table(HF_DECODER + HF_BIASES + HF_REST),
            fields={
                **HF_FIELDS,
                "head_dim": "head_dim",
                "window": "sliding_window",
                "n_experts": "num_local_experts",
                "n_active_experts": "num_experts_per_tok",
            },
            constants={**HF_CONSTANTS, "attention_bias": True, "swiglu_limit": 7.0, "swiglu_alpha": 1.702},
            write_rest=_write_rest,
            read_rest=_read_rest,
        ),
    )
    flavors: ClassVar[dict[str, ModelArgs]] = {
        "debug": GptOssArgs(
            dim=256, n_layers=4, n_heads=4, n_kv_heads=2, hidden_dim=192, n_experts=8, n_active_experts=2,
            vocab_size=2048, max_seq_len=8192, rope_theta=10000.0, rope_scaling_factor=1.0, window=64,
            balance_rate=0.05,
        ),
        "20B": GptOssArgs(dim=2880, n_layers=24, n_heads=64, n_kv_heads=8, hidden_dim=2880, n_experts=32),
        "120B": GptOssArgs(dim=2880, n_layers=36, n_heads=64, n_kv_heads=8, hidden_dim=2880),
    }  # fmt: skip

    args: GptOssArgs  # pyright: ignore[reportIncompatibleVariableOverride]

    def attention_options(self) -> dict[str, Any]:
        return {"biases": "qkvo", "has_sinks": True}
