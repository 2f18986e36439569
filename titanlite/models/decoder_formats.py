"""Formats of the decoder's tensors and arguments: the parts of the tables that Llama 3, Qwen3 and Qwen3-MoE share."""

from collections.abc import Callable, Collection, Mapping
from typing import Any

from titanlite.models.formats import ConfigJson, Entry

HF_DECODER = (
    Entry("tok_embeddings.weight", "model.embed_tokens.weight"),
    Entry("layers.{layer}.attention_norm.weight", "model.layers.{layer}.input_layernorm.weight"),
    Entry("layers.{layer}.attention.wq.weight", "model.layers.{layer}.self_attn.q_proj.weight"),
    Entry("layers.{layer}.attention.wk.weight", "model.layers.{layer}.self_attn.k_proj.weight"),
    Entry("layers.{layer}.attention.wv.weight", "model.layers.{layer}.self_attn.v_proj.weight"),
    Entry("layers.{layer}.attention.wo.weight", "model.layers.{layer}.self_attn.o_proj.weight"),
    Entry("layers.{layer}.ffn_norm.weight", "model.layers.{layer}.post_attention_layernorm.weight"),
    Entry("head.norm.weight", "model.norm.weight"),
    Entry("head.output.weight", "lm_head.weight"),
)
HF_BIASES = (
    Entry("layers.{layer}.attention.wq.bias", "model.layers.{layer}.self_attn.q_proj.bias"),
    Entry("layers.{layer}.attention.wk.bias", "model.layers.{layer}.self_attn.k_proj.bias"),
    Entry("layers.{layer}.attention.wv.bias", "model.layers.{layer}.self_attn.v_proj.bias"),
    Entry("layers.{layer}.attention.wo.bias", "model.layers.{layer}.self_attn.o_proj.bias"),
)
HF_QK_NORM = (
    Entry("layers.{layer}.attention.q_norm.weight", "model.layers.{layer}.self_attn.q_norm.weight"),
    Entry("layers.{layer}.attention.k_norm.weight", "model.layers.{layer}.self_attn.k_norm.weight"),
)
HF_FEED_FORWARD = (
    Entry("layers.{layer}.feed_forward.w1.weight", "model.layers.{layer}.mlp.gate_proj.weight"),
    Entry("layers.{layer}.feed_forward.w2.weight", "model.layers.{layer}.mlp.down_proj.weight"),
    Entry("layers.{layer}.feed_forward.w3.weight", "model.layers.{layer}.mlp.up_proj.weight"),
)
HF_EXPERTS = (
    Entry("layers.{layer}.feed_forward.router", "model.layers.{layer}.mlp.gate.weight"),
    Entry(
        "layers.{layer}.feed_forward.w1", "model.layers.{layer}.mlp.experts.{expert}.gate_proj.weight", transposed=True
    ),
    Entry(
        "layers.{layer}.feed_forward.w2", "model.layers.{layer}.mlp.experts.{expert}.down_proj.weight", transposed=True
    ),
    Entry(
        "layers.{layer}.feed_forward.w3", "model.layers.{layer}.mlp.experts.{expert}.up_proj.weight", transposed=True
    ),
)
HF_GROUPED_EXPERTS = (
    *HF_EXPERTS,
    *HF_FEED_FORWARD,
    Entry(
        "layers.{layer}.feed_forward.bias_E",
        "model.layers.{layer}.mlp.gate.e_score_correction_bias",
        keeps_dtype=True,
    ),
    Entry("layers.{layer}.feed_forward.shared.w1.weight", "model.layers.{layer}.mlp.shared_experts.gate_proj.weight"),
    Entry("layers.{layer}.feed_forward.shared.w2.weight", "model.layers.{layer}.mlp.shared_experts.down_proj.weight"),
    Entry("layers.{layer}.feed_forward.shared.w3.weight", "model.layers.{layer}.mlp.shared_experts.up_proj.weight"),
)
"""Tensors of a model with `GroupedExpertArgs` and dense first layers."""
HF_FURTHER = {
    "layers.{layer}.next_norm.weight": "model.layers.{layer}.enorm.weight",
    "layers.{layer}.hidden_norm.weight": "model.layers.{layer}.hnorm.weight",
    "layers.{layer}.join.weight": "model.layers.{layer}.eh_proj.weight",
    "layers.{layer}.block.": "model.layers.{layer}.",
    "head.further_norm.weight": "model.layers.{layer}.shared_head.norm.weight",
    "tok_embeddings.weight": "model.layers.{layer}.embed_tokens.weight",
    "head.output.weight": "model.layers.{layer}.shared_head.head.weight",
}
"""Names of multi-token prediction in releases of DeepSeek-V3 and GLM-4.5: a layer after the last, see `Table`."""
HF_FIELDS = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "hidden_dim": "intermediate_size",
    "vocab_size": "vocab_size",
    "max_seq_len": "max_position_embeddings",
    "norm_eps": "rms_norm_eps",
    "tied_head": "tie_word_embeddings",
}
HF_GROUPED_FIELDS = {
    **HF_FIELDS,
    "hidden_dim": "moe_intermediate_size",
    "dense_hidden_dim": "intermediate_size",
    "n_experts": "n_routed_experts",
    "n_active_experts": "num_experts_per_tok",
    "n_shared_experts": "n_shared_experts",
    "n_dense_layers": "first_k_dense_replace",
    "n_groups": "n_group",
    "n_active_groups": "topk_group",
    "routed_scaling_factor": "routed_scaling_factor",
}
HF_CONSTANTS = {"hidden_act": "silu", "attention_bias": False, "attention_dropout": 0.0}

# torchtitan keeps Meta's names for all families.
META_DECODER = (
    Entry("tok_embeddings.weight", "tok_embeddings.weight"),
    Entry("layers.{layer}.attention_norm.weight", "layers.{layer}.attention_norm.weight"),
    Entry("layers.{layer}.attention.wv.weight", "layers.{layer}.attention.wv.weight"),
    Entry("layers.{layer}.attention.wo.weight", "layers.{layer}.attention.wo.weight"),
    Entry("layers.{layer}.ffn_norm.weight", "layers.{layer}.ffn_norm.weight"),
    Entry("head.norm.weight", "norm.weight"),
    Entry("head.output.weight", "output.weight"),
)
META_QK = (
    Entry("layers.{layer}.attention.wq.weight", "layers.{layer}.attention.wq.weight"),
    Entry("layers.{layer}.attention.wk.weight", "layers.{layer}.attention.wk.weight"),
)
META_QK_NORM = (
    Entry("layers.{layer}.attention.q_norm.weight", "layers.{layer}.attention.q_norm.weight"),
    Entry("layers.{layer}.attention.k_norm.weight", "layers.{layer}.attention.k_norm.weight"),
)
META_FEED_FORWARD = (
    Entry("layers.{layer}.feed_forward.w1.weight", "layers.{layer}.feed_forward.w1.weight"),
    Entry("layers.{layer}.feed_forward.w2.weight", "layers.{layer}.feed_forward.w2.weight"),
    Entry("layers.{layer}.feed_forward.w3.weight", "layers.{layer}.feed_forward.w3.weight"),
)


ROPE_DEFAULTS = {"partial_rotary_factor": 1.0, "beta_fast": 32, "beta_slow": 1, "truncate": True}
"""What transformers takes for keys of RoPE that are missing."""


def read_rope(
    config: ConfigJson,
    kind: str | None = None,
    *,
    scaling: str | None = None,
    constants: Callable[[float], Mapping[str, Any]] = lambda factor: {},
    free: Collection[str] = (),
) -> dict[str, Any]:
    """Return RoPE's base, as rope_theta, and the factor of its wavelengths, 1 without scaling, beside the free keys.

    Args:
        kind: kind of layers. None: the RoPE of all layers.
        scaling: type of scaling that the model has. None: it has none.
        constants: return the values that other keys must have with a factor. Those of `ROPE_DEFAULTS`, and
            attention_factor, which follows from the factor, may be missing.
        free: keys with any value.

    Raises:
        ValueError: config.json asks for something else.
    """
    ropes = config["rope_parameters"]
    stated = {key: value for key, value in (ropes if kind is None else ropes[kind]).items() if value is not None}
    type_of = stated.pop("type", "default")
    rope = {**ROPE_DEFAULTS, "rope_type": type_of, **stated}
    if rope["rope_type"] == "default":  # which reads no other key
        rope = {key: rope[key] for key in ("rope_type", "rope_theta", "partial_rotary_factor")} | {"factor": 1}
    theta, factor = float(rope["rope_theta"]), float(rope["factor"])
    expected = {"partial_rotary_factor": 1.0}
    if rope["rope_type"] != "default":
        expected |= constants(factor)
    rope = {"attention_factor": expected.get("attention_factor"), **rope}
    checked = ({*stated, *expected} & rope.keys() | expected.keys()) - {"rope_type", "rope_theta", "factor", *free}
    wrong = {key: rope.get(key) for key in sorted(checked) if rope.get(key) != expected.get(key)}
    if rope["rope_type"] not in ("default", scaling) or wrong or factor < 1:
        known = {"rope_type": scaling, **expected} if scaling else expected
        raise ValueError(f"RoPE {stated} is not supported, only default{f' or {known}' if scaling else ''}")
    return {"rope_theta": theta, "factor": factor, **{key: rope[key] for key in free if key in rope}}


KINDS = {True: "full_attention", False: "sliding_attention"}
"""Kinds of layers that attend, in layer_types of config.json, by whether they have no window."""


def write_layer_types(args: Any) -> list[str]:
    """Return the kind of each layer."""
    layers = [args.attention_of(layer) for layer in range(args.n_layers)]
    return ["linear_attention" if layer.has_state else KINDS[layer.window is None] for layer in layers]


def read_full_every(config: ConfigJson, *, other: str = KINDS[False]) -> int:
    """Return n where each n-th layer attends to all tokens before it, and all others are of another kind.

    Args:
        other: that kind.

    Raises:
        ValueError: the layers have no such pattern.
    """
    full, kinds = KINDS[True], config["layer_types"]
    every = kinds.index(full) + 1 if full in kinds else len(kinds) + 1
    if kinds != [other if number % every else full for number in range(1, len(kinds) + 1)]:
        raise ValueError(f"layer_types {kinds} is not supported, only full attention in each n-th layer")
    return every


def check_head_dim(config: ConfigJson) -> None:
    """Check that heads have the size that follows from their number.

    Raises:
        ValueError: they have another one.
    """
    size, found = config["hidden_size"] // (config["num_attention_heads"] or 1), config.get("head_dim")
    if found not in (None, size):
        others = 'model.name = "transformers" trains it'
        raise ValueError(f"head_dim = {found!r} is not supported in this family, only {size} ({others})")


def check_full(config: ConfigJson) -> None:
    """Check that no layer has a window.

    Raises:
        ValueError: one has.
    """
    if {*config.get("layer_types", ())} - {KINDS[True]}:
        raise ValueError(f"layer_types {config['layer_types']} is not supported in this family")


def write_plain_rope(args: Any) -> ConfigJson:
    """Return the keys of config.json for RoPE without scaling."""
    return {"rope_theta": args.rope_theta, "rope_scaling": None}


def read_plain_rope(config: ConfigJson) -> dict[str, Any]:
    """Return the argument for RoPE without scaling, in models whose layers all see all tokens before them.

    Raises:
        ValueError: config.json asks for scaling, or for windows.
    """
    check_full(config)
    return {"rope_theta": read_rope(config)["rope_theta"]}


def write_partial_rope(args: Any) -> ConfigJson:
    """Return the keys of config.json for RoPE of a share of each head, without scaling."""
    return {**write_plain_rope(args), "partial_rotary_factor": args.rotary_factor}


def read_partial_rope(config: ConfigJson) -> dict[str, Any]:
    """Return the arguments for RoPE of a share of each head, without scaling.

    Raises:
        ValueError: config.json asks for scaling.
    """
    rope = read_rope(config, free=["partial_rotary_factor"])
    share = config["rope_parameters"]["partial_rotary_factor"]  # whose default differs between families
    return {"rope_theta": rope["rope_theta"], "rotary_factor": share}
