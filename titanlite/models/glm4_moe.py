"""GLM-4.5 (arXiv:2508.06471): the experts of DeepSeek-V3, and attention that rotates half of each head.

The released models have a further layer for multi-token prediction, which is not here.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from titanlite.models.base import ModelArgs
from titanlite.models.decoder_formats import (
    HF_BIASES,
    HF_CONSTANTS,
    HF_DECODER,
    HF_FURTHER,
    HF_GROUPED_EXPERTS,
    HF_GROUPED_FIELDS,
    HF_QK_NORM,
    read_partial_rope,
    write_partial_rope,
)
from titanlite.models.experts import DecoderOfExperts, GroupedExpertArgs
from titanlite.models.formats import ConfigJson, Formats, HuggingFace, Table
from titanlite.models.qwen3 import PartlyRotatedArgs


@dataclass(frozen=True, kw_only=True)
class Glm4MoeArgs(PartlyRotatedArgs, GroupedExpertArgs):
    vocab_size: int = 151552
    max_seq_len: int = 131072
    norm_eps: float = 1e-5
    n_experts: int = 128
    n_active_experts: int = 8
    rotary_factor: float = 0.5
    qk_norm: bool = False
    """Norms of the queries and keys of each head."""


def _write_rest(args: Glm4MoeArgs) -> ConfigJson:
    return {**write_partial_rope(args), "num_nextn_predict_layers": 0}


class Glm4Moe(DecoderOfExperts):
    draws_random = False
    formats = Formats(
        hugging_face=HuggingFace(
            architecture="Glm4MoeForCausalLM",
            model_type="glm4_moe",
            tensors=Table(HF_DECODER + HF_BIASES + HF_QK_NORM + HF_GROUPED_EXPERTS, HF_FURTHER),
            fields={**HF_GROUPED_FIELDS, "head_dim": "head_dim", "qk_norm": "use_qk_norm"},
            constants={**HF_CONSTANTS, "attention_bias": True, "norm_topk_prob": True},
            write_rest=_write_rest,
            read_rest=read_partial_rope,
        ),
    )
    flavors: ClassVar[dict[str, ModelArgs]] = {
        "debug": Glm4MoeArgs(
            dim=256, n_layers=4, n_heads=4, n_kv_heads=2, hidden_dim=192, head_dim=64, n_experts=8, n_active_experts=2,
            dense_hidden_dim=768, vocab_size=2048, max_seq_len=8192, rope_theta=10000.0, balance_rate=0.01,
        ),
        "106B-A12B": Glm4MoeArgs(
            dim=4096, n_layers=46, n_heads=96, n_kv_heads=8, hidden_dim=1408, dense_hidden_dim=10944,
        ),
        "355B-A32B": Glm4MoeArgs(
            dim=5120, n_layers=92, n_heads=96, n_kv_heads=8, hidden_dim=1536, dense_hidden_dim=12288, n_experts=160,
            n_dense_layers=3, routed_scaling_factor=2.5, qk_norm=True,
        ),
    }  # fmt: skip

    args: Glm4MoeArgs  # pyright: ignore[reportIncompatibleVariableOverride]

    def attention_options(self) -> dict[str, Any]:
        return {"biases": "qkv", "qk_norm_eps": self.args.norm_eps if self.args.qk_norm else None}
