"""Small decoders of transformers."""

from typing import Any

from tests.support.helpers import TinyRun

SIZE = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
LINEAR = {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "num_experts": 4, "shared_expert_intermediate_size": 16,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "olmo2": {},
    "gemma3_text": {"head_dim": 8, "sliding_window": 7, "num_hidden_layers": 6},
    "smollm3": {},
    "gpt_oss": {"head_dim": 8, "sliding_window": 7, "num_local_experts": 4, "num_experts_per_tok": 2},
    "granite": {"logits_scaling": 4.0, "residual_multiplier": 0.5},
    "glm4_moe": {**EXPERTS, "head_dim": 8, "n_routed_experts": 4},
    "lfm2": {"head_dim": 8},
    "qwen3_next": {**EXPERTS, **LINEAR, "head_dim": 8, "num_hidden_layers": 4},
}
"""Model types with sizes. The last two are hybrid: layers of convolutions, and of gated delta rules."""

TOML = """
[model]
name = "transformers"
path = "{0}"
args = {{num_hidden_layers = {1}, {2}}}
"""


def config_of(tiny: TinyRun, name: str) -> None:
    """Let a run train a model type."""
    sizes = {**SIZE, **FAMILIES[name]}
    from titanlite.models.transformers import decoder_of

    cls = decoder_of(name)
    known = {key: value for key, value in sizes.items() if hasattr(next(iter(cls.flavors.values())), key)}
    layers = known.pop("num_hidden_layers", 2)
    words = ", ".join(f"{key} = {value}" for key, value in known.items())
    text = tiny.toml.read_text()
    start, end = text.index("[model.args]"), text.index("[training]")
    tiny.toml.write_text(text[:start] + text[end:] + TOML.format(name, layers, words))
