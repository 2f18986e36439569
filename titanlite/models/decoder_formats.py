"""Formats of the decoder's tensors and arguments: the parts of the tables that Llama 3, Qwen3 and Qwen3-MoE share."""

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
"""Of `GroupedExpertArgs`, with dense first layers."""
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


def rope_theta(config: ConfigJson, default: float = 10000.0) -> float:
    """Return the base of RoPE: config.json has it at the top, or in rope_parameters since transformers 5.

    Args:
        default: what transformers takes for files that lack it.
    """
    for place in (config.get("rope_parameters") or {}, config):
        if "rope_theta" in place:
            return float(place["rope_theta"])
    return default


def rope_scaling(config: ConfigJson) -> dict[str, Any]:
    """Return the scaling of RoPE's wavelengths; nothing if there is none."""
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    return {} if kind == "default" else {**scaling, "rope_type": kind}


KINDS = {True: "full_attention", False: "sliding_attention"}
"""Kinds of layers that attend, in layer_types of config.json, by whether they have no window."""


def write_layer_types(args: Any) -> list[str]:
    """Return the kind of each layer."""
    layers = [args.attention_of(layer) for layer in range(args.n_layers)]
    return ["linear_attention" if it.has_state else KINDS[it.window is None] for it in layers]


def read_full_every(config: ConfigJson, default: int, *, other: str = KINDS[False]) -> int:
    """Return n where each n-th layer attends to all tokens before it, and all others are of another kind.

    Args:
        default: n of files that lack layer_types.
        other: that kind.

    Raises:
        ValueError: the layers have no such pattern.
    """
    numbers = range(1, config.get("num_hidden_layers", 0) + 1)
    full = KINDS[True]
    kinds = config.get("layer_types") or [other if number % default else full for number in numbers]
    every = kinds.index(full) + 1 if full in kinds else len(kinds) + 1
    if kinds != [other if number % every else full for number in range(1, len(kinds) + 1)]:
        raise ValueError(f"layer_types {kinds} is not supported, only full attention in each n-th layer")
    return every


def write_plain_rope(args: Any) -> ConfigJson:
    """Return the keys of config.json for RoPE without scaling."""
    return {"rope_theta": args.rope_theta, "rope_scaling": None}


def read_plain_rope(config: ConfigJson, default: float = 10000.0) -> dict[str, Any]:
    """Return the argument for RoPE without scaling.

    Args:
        default: base of files that lack it.

    Raises:
        ValueError: config.json asks for scaling.
    """
    if scaling := rope_scaling(config):
        raise ValueError(f"RoPE scaling of type {scaling['rope_type']!r} is not supported in this family")
    return {"rope_theta": rope_theta(config, default)}


def write_partial_rope(args: Any) -> ConfigJson:
    """Return the keys of config.json for RoPE of a share of each head, without scaling."""
    return {**write_plain_rope(args), "partial_rotary_factor": args.rotary_factor}


def read_partial_rope(config: ConfigJson, share: float) -> dict[str, Any]:
    """Return the arguments for RoPE of a share of each head, without scaling.

    Args:
        share: of files that lack it.

    Raises:
        ValueError: config.json asks for scaling.
    """
    places = config.get("rope_parameters") or {}, config  # the first since transformers 5
    factors = [place["partial_rotary_factor"] for place in places if "partial_rotary_factor" in place]
    return {**read_plain_rope(config), "rotary_factor": [*factors, share][0]}
