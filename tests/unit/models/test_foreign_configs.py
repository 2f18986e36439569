"""Variants of config.json: each is computed as transformers computes it, or refused."""

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers

from tests.support.families import FAMILIES, renamed
from titanlite.models.base import build_on_meta
from titanlite.models.decoder import Decoder
from titanlite.models.formats import HuggingFace
from titanlite.models.registry import MODELS
from titanlite.models.trial import fill
from titanlite.parallelize.materialize import allocate

CPU = torch.device("cpu")
TOKENS = torch.randint(0, 64, (1, 24), generator=torch.Generator().manual_seed(0))
SMALL: dict[str, Any] = {
    "dim": 64, "n_layers": 4, "n_heads": 4, "n_kv_heads": 2, "hidden_dim": 96, "vocab_size": 101, "max_seq_len": 64,
}  # fmt: skip
ROPES: list[dict[str, Any] | None] = [
    None,
    {},
    {"rope_type": "default", "rope_theta": 700.0},
    {"rope_type": "default", "rope_theta": None},
    {"rope_type": "default", "factor": 4.0},
    {"rope_type": "default", "partial_rotary_factor": 0.5},
    {"type": "linear", "factor": 4.0},
    {"rope_type": "linear", "factor": 4.0, "rope_theta": 700.0},
    {"rope_type": "linear", "factor": 0.5},
    {"rope_type": "linear"},
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "longrope", "factor": 2.0, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8},
    {"rope_type": "yarn", "factor": 4.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096, "truncate": False},
    {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096, "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192, "attention_factor": 1.5},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192, "beta_fast": 16, "beta_slow": None},
    {"rope_type": "yarn", "factor": 0.5, "original_max_position_embeddings": 8192},
    {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 4096, "truncate": False},
    {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    {"rope_type": "llama3", "factor": 8.0},
    {"rope_type": "proportional", "factor": 2.0},
    {"full_attention": {"rope_type": "linear", "factor": 4.0}, "sliding_attention": {"rope_type": "default"}},
    {"full_attention": {"rope_type": "default", "rope_theta": 700.0}, "sliding_attention": {"rope_theta": 300.0}},
    {"full_attention": {"rope_type": "default", "rope_theta": 700.0}, "sliding_attention": None},
    {"full_attention": {"rope_type": "default"}},
    {"sliding_attention": {"rope_type": "linear", "factor": 2.0}},
    {
        "sliding_attention": {"rope_type": "default", "rope_theta": 700.0},
        "full_attention": {
            "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192, "rope_theta": 700.0,
        },
    },
]  # fmt: skip


def base_of(family: str) -> tuple[HuggingFace, dict[str, Any]]:
    """Return a family's format, and the config.json of a small model."""
    if family in FAMILIES:
        model_cls, args = FAMILIES[family]
    else:
        model_cls = MODELS[family]
        experts = {"n_experts": 4, "n_active_experts": 2} if family == "qwen3_moe" else {}
        heads = {} if family == "llama3" else {"head_dim": 16}
        args = replace(next(iter(model_cls.flavors.values())), **SMALL, **experts, **heads)
    form = model_cls.formats.hugging_face
    assert form is not None
    return form, {"tie_word_embeddings": False, **form.to_config(args)}


@torch.no_grad()
def outcome(family: str, config: dict[str, Any]) -> str:
    """Return what comes of a config.json: "equal", "refused", or how far logits differ from those of transformers."""
    form, _ = base_of(family)
    model_cls = FAMILIES[family][0] if family in FAMILIES else MODELS[family]
    try:
        found = form.to_args(deepcopy(config))
        model = build_on_meta(model_cls, type(next(iter(model_cls.flavors.values())))(**found))
    except (ValueError, TypeError):  # as `open_source` and `check_args` take them
        return "refused"
    assert isinstance(model, Decoder)
    allocate(model, CPU, CPU)
    fill(model)
    try:
        theirs_config = transformers.CONFIG_MAPPING[form.model_type].from_dict(deepcopy(config))
        other = transformers.AutoModelForCausalLM.from_config(theirs_config, attn_implementation="eager")
        loaded = other.load_state_dict(renamed(model, model.state_dict()), strict=False)
        if {*loaded.missing_keys} - {"lm_head.weight"} or loaded.unexpected_keys:
            return "refused"  # as the tensors are not those of the model
        expected = other.float().eval()(TOKENS).logits
    except (RuntimeError, AttributeError) as error:
        if "size mismatch" in str(error):
            return "refused"
        return f"transformers fails: {error}"
    apart = float((model.eval()(TOKENS) - expected).abs().max() / expected.abs().max())
    return "equal" if apart < 1e-4 else f"{apart:.1e}"


def variants(family: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each config.json of a family without one key, with null for one, and with another value of one."""
    form, base = base_of(family)
    declared = transformers.CONFIG_MAPPING[form.model_type]().to_dict()
    of_generation = {"pad_token_id", "return_dict"}  # for which transformers returns something else, or nothing
    for key in sorted({*base, *declared} - {"model_type", "architectures", *of_generation}):
        without = {name: value for name, value in base.items() if name != key}
        yield f"without {key}", without
        yield f"{key}: null", {**base, key: None}
        match {**declared, **base}[key]:
            case bool(value):
                yield f"{key}: {not value}", {**base, key: not value}
            case int(value) | float(value):
                yield f"{key}: {2 * value or 1}", {**base, key: 2 * value or 1}
            case [first, *rest]:
                yield f"{key}: reversed", {**base, key: [*reversed(rest), first]}
            case str():
                yield f"{key}: relu", {**base, key: "relu"}


def ropes(family: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield configs with each pair of RoPE's two keys, with a base beside them and without."""
    _, base = base_of(family)
    plain = {key: value for key, value in base.items() if not key.startswith("rope_") or key == "rope_interleave"}
    for theta in ({}, {"rope_theta": 300.0}):
        for parameters in ROPES:
            yield f"{theta} {parameters}", {**plain, **theta, "rope_parameters": parameters}
            for scaling in ROPES:
                yield f"{theta} {scaling} over {parameters}", {
                    **plain, **theta, "rope_parameters": parameters, "rope_scaling": scaling,
                }  # fmt: skip


EVERY = [*FAMILIES, "llama3", "qwen3", "qwen3_moe"]


@pytest.mark.parametrize("step", [pytest.param(4, marks=pytest.mark.slow), pytest.param(1, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("family", EVERY)
def test_each_key_is_read_as_by_transformers(family: str, step: int) -> None:
    """In CI every fourth variant: others for each family, most of whose keys are those of all."""
    several = [*variants(family)][EVERY.index(family) % step :: step]
    found = {name: outcome(family, config) for name, config in several}
    assert {name: outcome for name, outcome in found.items() if outcome not in ("equal", "refused")} == {}
    assert [*found.values()].count("equal") > len(found) / 3


@pytest.mark.parametrize("step", [pytest.param(47, marks=pytest.mark.slow), pytest.param(1, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("family", EVERY)
def test_rope_is_read_as_by_transformers(family: str, step: int) -> None:
    found = {name: outcome(family, config) for name, config in [*ropes(family)][::step]}
    assert {name: outcome for name, outcome in found.items() if outcome not in ("equal", "refused")} == {}
    assert "equal" in found.values()


LINEAR, DEFAULT = {"rope_type": "linear", "factor": 4.0}, {"rope_type": "default", "rope_theta": 700.0}


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "changes", "missing", "expected"),
    [
        ("qwen3_moe", {}, ["norm_topk_prob"], "refused"),
        ("smollm3", {}, ["tie_word_embeddings"], "equal"),
        ("glm4_moe", {}, ["attention_bias"], "refused"),
        ("gpt_oss", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "truncate": False}}, [], "refused"),
        ("gpt_oss", {"rope_scaling": None}, ["rope_parameters"], "equal"),
        ("olmo3", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, ["rope_parameters"], "refused"),
        ("qwen3", {"rope_parameters": None}, ["rope_theta", "rope_scaling"], "equal"),
        ("qwen3", {"rope_parameters": DEFAULT, "rope_scaling": LINEAR}, [], "refused"),
        ("llama3", {"rope_parameters": DEFAULT, "rope_scaling": LINEAR}, [], "refused"),
        ("llama3", {"rope_parameters": DEFAULT, "rope_scaling": None}, [], "equal"),
        ("gemma3", {"rope_scaling": LINEAR}, [], "equal"),
        ("gemma3", {"rope_scaling": LINEAR}, ["rope_parameters"], "equal"),
        ("deepseek_v3", {"rope_parameters": DEFAULT, "rope_scaling": LINEAR}, [], "refused"),
        ("deepseek_v3", {"head_dim": 16}, [], "refused"),
    ],
)
def test_two_descriptions_and_missing_keys(
    family: str, changes: dict[str, Any], missing: list[str], expected: str
) -> None:
    _, base = base_of(family)
    config = {key: value for key, value in {**base, **changes}.items() if key not in missing}
    assert outcome(family, config) == expected
