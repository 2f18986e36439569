"""SmolLM3 (https://huggingface.co/blog/smollm3): a Llama of which every fourth layer has no positions."""

from dataclasses import dataclass
from typing import Any, ClassVar

from titanlite.models.base import ModelArgs
from titanlite.models.decoder import Decoder, DecoderArgs, LayerAttention
from titanlite.models.decoder_formats import (
    HF_CONSTANTS,
    HF_DECODER,
    HF_FEED_FORWARD,
    HF_FIELDS,
    check_head_dim,
    read_plain_rope,
    write_plain_rope,
)
from titanlite.models.formats import ConfigJson, Formats, HuggingFace, Table


@dataclass(frozen=True, kw_only=True)
class SmolLM3Args(DecoderArgs):
    vocab_size: int = 128256
    max_seq_len: int = 65536
    norm_eps: float = 1e-6
    rope_theta: float = 5e6
    no_rope_every: int = 4
    """Each so many layers, the last has no positions."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.no_rope_every < 1:
            raise ValueError(f"no_rope_every must be at least 1, got {self.no_rope_every}")

    def attention_of(self, layer: int) -> LayerAttention:
        return LayerAttention(rope=None if (layer + 1) % self.no_rope_every == 0 else 0)


def _write_rest(args: SmolLM3Args) -> ConfigJson:
    rotates = [int(args.attention_of(layer).rope is not None) for layer in range(args.n_layers)]
    layers = {"no_rope_layers": rotates, "no_rope_layer_interval": args.no_rope_every}
    return {**write_plain_rope(args), **layers, "pad_token_id": None}  # transformers' default is of another vocabulary


def _read_rest(config: ConfigJson) -> dict[str, Any]:
    check_head_dim(config)
    layers = config["num_hidden_layers"]
    rotates = config["no_rope_layers"][:layers]  # 1 where a layer has positions
    every = rotates.index(0) + 1 if 0 in rotates else layers + 1
    if rotates != [int((layer + 1) % every != 0) for layer in range(layers)]:
        raise ValueError(f"no_rope_layers {rotates} is not supported, only each n-th layer without positions")
    return {**read_plain_rope(config), "no_rope_every": every}


class SmolLM3(Decoder):
    draws_random = False
    formats = Formats(
        hugging_face=HuggingFace(
            architecture="SmolLM3ForCausalLM",
            model_type="smollm3",
            tensors=Table(HF_DECODER + HF_FEED_FORWARD),
            fields=HF_FIELDS,
            constants={**HF_CONSTANTS, "mlp_bias": False, "use_sliding_window": False},
            write_rest=_write_rest,
            read_rest=_read_rest,
        ),
    )
    flavors: ClassVar[dict[str, ModelArgs]] = {
        "debug": SmolLM3Args(
            dim=256, n_layers=4, n_heads=4, n_kv_heads=2, hidden_dim=768, vocab_size=2048, max_seq_len=8192,
            rope_theta=10000.0, tied_head=True,
        ),
        "3B": SmolLM3Args(dim=2048, n_layers=36, n_heads=16, n_kv_heads=4, hidden_dim=11008, tied_head=True),
    }  # fmt: skip
