"""Qwen3, dense (arXiv:2505.09388): a Llama with normalized queries and keys, whose head size is its own number."""

from dataclasses import dataclass
from typing import Any, ClassVar

from titanlite.models.base import ModelArgs
from titanlite.models.decoder import Decoder, DecoderArgs
from titanlite.models.decoder_formats import (
    HF_CONSTANTS,
    HF_DECODER,
    HF_FEED_FORWARD,
    HF_FIELDS,
    HF_QK_NORM,
    META_DECODER,
    META_FEED_FORWARD,
    META_QK,
    META_QK_NORM,
    read_plain_rope,
    write_plain_rope,
)
from titanlite.models.formats import Formats, HuggingFace, Table


@dataclass(frozen=True, kw_only=True)
class Qwen3Args(DecoderArgs):
    head_dim: int = 128
    vocab_size: int = 151936
    max_seq_len: int = 40960
    norm_eps: float = 1e-6
    rope_theta: float = 1e6

    @property
    def head_size(self) -> int:
        return self.head_dim

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.head_dim < 2 or self.head_dim % 2:
            raise ValueError(f"head_dim must be even, got {self.head_dim}")


@dataclass(frozen=True, kw_only=True)
class PartlyRotatedArgs(Qwen3Args):
    rotary_factor: float
    """Share of the dims of a head that positions rotate."""

    @property
    def rotary_dims(self) -> int:
        return int(self.head_dim * self.rotary_factor)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.rotary_factor <= 1 or self.rotary_dims % 2:
            raise ValueError(f"rotary_factor must give an even share of head_dim, got {self.rotary_factor}")


class Qwen3(Decoder):
    draws_random = False
    formats = Formats(
        hugging_face=HuggingFace(
            architecture="Qwen3ForCausalLM",
            model_type="qwen3",
            tensors=Table(HF_DECODER + HF_QK_NORM + HF_FEED_FORWARD),
            fields={**HF_FIELDS, "head_dim": "head_dim"},
            constants={**HF_CONSTANTS, "use_sliding_window": False},
            write_rest=write_plain_rope,
            read_rest=read_plain_rope,
        ),
        torchtitan=Table(META_DECODER + META_QK + META_QK_NORM + META_FEED_FORWARD),
    )
    flavors: ClassVar[dict[str, ModelArgs]] = {
        "debug": Qwen3Args(
            dim=256, n_layers=6, n_heads=4, n_kv_heads=2, hidden_dim=768, head_dim=96, vocab_size=2048,
            max_seq_len=8192, rope_theta=10000.0, tied_head=True,
        ),
        "0.6B": Qwen3Args(dim=1024, n_layers=28, n_heads=16, n_kv_heads=8, hidden_dim=3072, tied_head=True),
        "1.7B": Qwen3Args(dim=2048, n_layers=28, n_heads=16, n_kv_heads=8, hidden_dim=6144, tied_head=True),
        "4B": Qwen3Args(dim=2560, n_layers=36, n_heads=32, n_kv_heads=8, hidden_dim=9728, tied_head=True),
        "8B": Qwen3Args(dim=4096, n_layers=36, n_heads=32, n_kv_heads=8, hidden_dim=12288),
        "14B": Qwen3Args(dim=5120, n_layers=40, n_heads=40, n_kv_heads=8, hidden_dim=17408),
        "32B": Qwen3Args(dim=5120, n_layers=64, n_heads=64, n_kv_heads=8, hidden_dim=25600),
    }  # fmt: skip

    args: Qwen3Args  # pyright: ignore[reportIncompatibleVariableOverride]

    def attention_options(self) -> dict[str, Any]:
        return {"qk_norm_eps": self.args.norm_eps}
