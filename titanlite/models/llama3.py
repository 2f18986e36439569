"""Llama 3, 3.1 and 3.2 (arXiv:2407.21783). Parameter names follow Meta's; RoPE pairs follow Hugging Face's halves."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from titanlite.models.base import ModelArgs
from titanlite.models.decoder import Decoder, DecoderArgs
from titanlite.models.layers import rope_cos_sin


@dataclass(frozen=True, kw_only=True)
class Llama3Args(DecoderArgs):
    vocab_size: int = 128256
    max_seq_len: int = 131072
    norm_eps: float = 1e-5
    rope_theta: float = 500000.0
    rope_scaling_factor: float = 8.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dim % (2 * self.n_heads):
            raise ValueError(f"dim {self.dim} must be a multiple of 2 x n_heads ({self.n_heads})")


class Llama3(Decoder):
    draws_random = False
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

    def rope_tables(self) -> tuple[Tensor, Tensor]:
        args = self.args
        return rope_cos_sin(args.head_size, args.max_seq_len, args.rope_theta, args.rope_scaling_factor)
