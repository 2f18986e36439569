"""Llama 3, 3.1 and 3.2 (arXiv:2407.21783). Parameter names follow Meta's; RoPE pairs follow Hugging Face's halves."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from titanlite.models.base import ModelArgs
from titanlite.models.decoder import Decoder, DecoderArgs
from titanlite.models.decoder_formats import (
    HF_CONSTANTS,
    HF_DECODER,
    HF_FEED_FORWARD,
    HF_FIELDS,
    META_DECODER,
    META_FEED_FORWARD,
    META_QK,
    check_head_dim,
    read_rope,
    write_plain_rope,
)
from titanlite.models.formats import ConfigJson, Formats, HuggingFace, Table
from titanlite.models.layers import Rope


@dataclass(frozen=True, kw_only=True)
class Llama3Args(DecoderArgs):
    vocab_size: int = 128256
    max_seq_len: int = 131072
    norm_eps: float = 1e-5
    rope_theta: float = 500000.0
    rope_scaling_factor: float = 8.0

    @property
    def ropes(self) -> tuple[Rope, ...]:
        return (Rope(theta=self.rope_theta, factor=self.rope_scaling_factor),)


def _write_rope(args: Llama3Args) -> ConfigJson:
    if args.rope_scaling_factor == 1.0:
        return write_plain_rope(args)
    scaling = {"rope_type": "llama3", "factor": args.rope_scaling_factor, **SCALING}
    return {"rope_theta": args.rope_theta, "rope_scaling": scaling}


def _read_rope(config: ConfigJson) -> dict[str, Any]:
    check_head_dim(config)
    rope = read_rope(config, scaling="llama3", constants=lambda factor: SCALING)
    return {"rope_theta": rope["rope_theta"], "rope_scaling_factor": rope["factor"]}


SCALING = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Constants of `Rope`, by their keys of config.json."""

INTERLEAVED_QK = tuple(replace(entry, interleaved=True) for entry in META_QK)


class Llama3(Decoder):
    draws_random = False
    formats = Formats(
        hugging_face=HuggingFace(
            architecture="LlamaForCausalLM",
            model_type="llama",
            tensors=Table(HF_DECODER + HF_FEED_FORWARD),
            fields=HF_FIELDS,
            constants={**HF_CONSTANTS, "mlp_bias": False},
            write_rest=_write_rope,
            read_rest=_read_rope,
        ),
        torchtitan=Table(META_DECODER + INTERLEAVED_QK + META_FEED_FORWARD),
    )
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

    args: Llama3Args  # pyright: ignore[reportIncompatibleVariableOverride]
