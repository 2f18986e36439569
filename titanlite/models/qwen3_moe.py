"""Qwen3-MoE (arXiv:2505.09388): Qwen3 whose feed-forward layers are experts, of which a router picks a few a token."""

from dataclasses import dataclass
from typing import Any, ClassVar

from titanlite.models.base import ModelArgs
from titanlite.models.decoder_formats import (
    HF_CONSTANTS,
    HF_DECODER,
    HF_EXPERTS,
    HF_FIELDS,
    HF_QK_NORM,
    META_DECODER,
    META_QK,
    META_QK_NORM,
    read_plain_rope,
    write_plain_rope,
)
from titanlite.models.experts import DecoderOfExperts, ExpertArgs, Experts
from titanlite.models.formats import ConfigJson, Entry, Formats, HuggingFace, Table
from titanlite.models.qwen3 import Qwen3, Qwen3Args

__all__ = ["Experts", "Qwen3Moe", "Qwen3MoeArgs"]


@dataclass(frozen=True, kw_only=True)
class Qwen3MoeArgs(Qwen3Args, ExpertArgs):
    """hidden_dim is that of one expert."""

    n_experts: int = 128
    n_active_experts: int = 8
    balance_rate: float = 5e-3
    """Change of an expert's bias in a step, in units of the router's logits; 0 turns balancing off. This default is
    like 1e-3 for the sigmoid of arXiv:2408.15664. Short runs at a high learning rate need more (`busiest_expert`)."""


def _write_rest(args: Qwen3MoeArgs) -> ConfigJson:
    # transformers wants the size of dense feed-forward layers, of which these models have none.
    return {**write_plain_rope(args), "num_experts": args.n_experts, "intermediate_size": args.hidden_dim}


def _read_rest(config: ConfigJson) -> dict[str, Any]:
    key = "num_local_experts" if "num_local_experts" in config else "num_experts"  # the first since transformers 5
    return {**read_plain_rope(config), "n_experts": config[key]}


# moe.expert_bias of torchtitan counts on probabilities and ours on logits, so neither stands for the other.
TORCHTITAN_EXPERTS = (
    Entry("layers.{layer}.feed_forward.router", "layers.{layer}.moe.router.gate.weight"),
    Entry("layers.{layer}.feed_forward.w1", "layers.{layer}.moe.experts.w1", transposed=True),
    Entry("layers.{layer}.feed_forward.w2", "layers.{layer}.moe.experts.w2", transposed=True),
    Entry("layers.{layer}.feed_forward.w3", "layers.{layer}.moe.experts.w3", transposed=True),
)


class Qwen3Moe(DecoderOfExperts, Qwen3):  # pyright: ignore[reportIncompatibleVariableOverride]
    draws_random = False
    formats = Formats(
        hugging_face=HuggingFace(
            architecture="Qwen3MoeForCausalLM",
            model_type="qwen3_moe",
            tensors=Table(HF_DECODER + HF_QK_NORM + HF_EXPERTS),
            fields={
                **HF_FIELDS,
                "head_dim": "head_dim",
                "hidden_dim": "moe_intermediate_size",
                "n_active_experts": "num_experts_per_tok",
            },
            constants={
                **HF_CONSTANTS,
                "use_sliding_window": False,
                "decoder_sparse_step": 1,
                "mlp_only_layers": [],
                "norm_topk_prob": True,
            },
            write_rest=_write_rest,
            read_rest=_read_rest,
        ),
        torchtitan=Table(META_DECODER + META_QK + META_QK_NORM + TORCHTITAN_EXPERTS),
    )
    flavors: ClassVar[dict[str, ModelArgs]] = {
        "debug": Qwen3MoeArgs(
            dim=256, n_layers=4, n_heads=4, n_kv_heads=2, hidden_dim=192, head_dim=64, n_experts=8, n_active_experts=2,
            vocab_size=2048, max_seq_len=8192, rope_theta=10000.0, balance_rate=0.05,
        ),
        "30B-A3B": Qwen3MoeArgs(dim=2048, n_layers=48, n_heads=32, n_kv_heads=4, hidden_dim=768),
        "235B-A22B": Qwen3MoeArgs(dim=4096, n_layers=94, n_heads=64, n_kv_heads=4, hidden_dim=1536),
    }  # fmt: skip

    args: Qwen3MoeArgs  # pyright: ignore[reportIncompatibleVariableOverride]
