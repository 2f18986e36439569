"""Families whose layers attend or route in different ways, against transformers' models."""

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.support import models
from tests.support.families import FAMILIES, built, oracle, renamed
from titanlite.models.base import vector_names
from titanlite.models.decoder import Decoder, LayerAttention
from titanlite.models.experts import DecoderOfExperts, ExpertArgs, Experts
from titanlite.models.layers import FeedForward
from titanlite.models.registry import MODELS, resolve_model
from titanlite.ops.cpu import CpuKernels
from titanlite.ops.kernels import Kernels
from titanlite.runtime.errors import UserError
from titanlite.schema import ActivationCheckpoint, Config, Optimizer
from titanlite.step import Step
from titanlite.techniques.loss_scale.scale import ScaledStep
from titanlite.techniques.parametrization import find_scaling
from titanlite.tools import cli
from titanlite.tools.convert.generation import Generator, Sampler
from titanlite.tools.plan.estimate import period_of
from titanlite.tools.plan.recorder import flops_of

COUNTS = {
    ("llama3", "1B"): 1_235_814_400, ("llama3", "3B"): 3_212_749_824, ("llama3", "8B"): 8_030_261_248,
    ("llama3", "70B"): 70_553_706_496, ("llama3", "405B"): 405_853_388_800,
    ("qwen3", "0.6B"): 596_049_920, ("qwen3", "1.7B"): 1_720_574_976, ("qwen3", "4B"): 4_022_468_096,
    ("qwen3", "8B"): 8_190_735_360, ("qwen3", "14B"): 14_768_307_200, ("qwen3", "32B"): 32_762_123_264,
    ("qwen3_moe", "30B-A3B"): 30_532_122_624, ("qwen3_moe", "235B-A22B"): 235_093_634_560,
    ("gemma3", "270M"): 268_098_176, ("gemma3", "1B"): 999_885_952, ("gemma3", "4B"): 3_880_263_168,
    ("gemma3", "12B"): 11_766_034_176, ("gemma3", "27B"): 27_009_346_304,
    ("smollm3", "3B"): 3_075_098_624, ("olmo3", "7B"): 7_298_011_136, ("olmo3", "32B"): 32_233_522_176,
    ("glm4_moe", "106B-A12B"): 106_852_245_504, ("glm4_moe", "355B-A32B"): 352_797_814_784,
    ("gpt_oss", "20B"): 20_914_757_184, ("gpt_oss", "120B"): 116_829_156_672,
    ("deepseek_v3", "Moonlight-16B-A3B"): 15_960_108_544,
    ("deepseek_v3", "671B"): 671_026_404_352,  # and 14,848 biases of experts, which are buffers
    ("deepseek_v3", "Kimi-K2"): 1_026_408_209_408,
    ("qwen3_next", "80B-A3B"): 79_674_391_296,
}  # fmt: skip
TOKENS = torch.randint(0, 101, (2, 40), generator=torch.Generator().manual_seed(0))


def logits_apart(model: Decoder, other: Any) -> float:
    with torch.no_grad():
        return float((model(TOKENS) - other(TOKENS).logits).abs().max())


@pytest.mark.parametrize(("name", "flavor"), COUNTS)
def test_parameter_counts(name: str, flavor: str) -> None:
    model, args = resolve_model(name, flavor, {})
    with torch.device("meta"):
        assert sum(parameter.numel() for parameter in model(args).parameters()) == COUNTS[name, flavor]


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_gradients_equal_those_of_transformers(family: str) -> None:
    model = built(family)
    other = oracle(model)
    assert logits_apart(model, other) < 1e-5
    models.assert_gradients_equal(model, other, lambda tensors: renamed(model, tensors))


@pytest.mark.long
@pytest.mark.usefixtures("single_process_group")
@pytest.mark.parametrize("family", FAMILIES)
def test_twenty_steps_lose_as_much_as_with_transformers(family: str) -> None:
    unbalanced = {"balance_rate": 0.0} if isinstance(FAMILIES[family][1], ExpertArgs) else {}  # as transformers is
    model = built(family, scale=1, **unbalanced)
    models.assert_steps_equal(model, oracle(model))


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_weights_of_transformers_return_bit_for_bit(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    oracle(built(family)).to(dtype).save_pretrained(tmp_path / "theirs")
    assert cli.run(["checkpoint", "import", f"{tmp_path}/theirs", "--out", f"{tmp_path}/ours"]) == 0
    ours, back = f"{tmp_path}/ours/step-00000000", f"{tmp_path}/back"
    assert cli.run(["checkpoint", "export", ours, "--out", back, "--check", "--no-tokenizer"]) == 0
    found, expected = (load_file(tmp_path / folder / "model.safetensors") for folder in ("back", "theirs"))
    assert {name: value.dtype for name, value in found.items()} == {
        name: value.dtype for name, value in expected.items()
    }
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_gemma_rounds_as_transformers() -> None:
    model = built("gemma3", dim=96).bfloat16()
    other = oracle(model).bfloat16()
    x_BLD = model.tok_embeddings(TOKENS)
    assert torch.equal(x_BLD, other.model.embed_tokens(TOKENS))
    norm: Any = model.layers[0].attention_norm
    for kernels in (CpuKernels(), Kernels()):
        norm.kernels = kernels
        assert torch.equal(norm(x_BLD), other.model.layers[0].input_layernorm(x_BLD))


def other(value: Any) -> Any:
    """Return another value of an argument."""
    return not value if isinstance(value, bool) else value + 1 if isinstance(value, int) else value * 1.5


WITHOUT_EFFECT = {"max_seq_len", "balance_rate", "balance_loss", "norm_eps", "tied_head", "rope_most_turns"}
"""Arguments that logits do not show, or not for these sizes and weights."""


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_every_weight_and_argument_counts(family: str) -> None:
    """What a model left out, or computed with another size, would show in the comparison with transformers' models."""
    model, tokens = built(family), TOKENS[:1, :20]
    expected = model(tokens)

    def moved(model: Decoder) -> bool:
        return float((model(tokens) - expected).abs().max()) > 1e-4

    of_each_kind = {re.sub(r"\d+", "", name): parameter for name, parameter in model.named_parameters()}
    for parameter in of_each_kind.values():
        before = parameter.clone()
        parameter.mul_(1.5).add_(0.1)
        assert moved(model)
        parameter.copy_(before)
    assert not moved(model)
    for name in vars(model.args).keys() - WITHOUT_EFFECT:
        if isinstance(value := getattr(model.args, name), bool | int | float):
            try:
                changed = built(family, **{name: other(value)})
                changed.load_state_dict(model.state_dict())
            except (RuntimeError, UserError, ValueError):  # weights of other shapes
                continue
            assert moved(changed), name


@pytest.mark.parametrize("family", FAMILIES)
def test_documents_are_computed_as_if_alone(family: str) -> None:
    model = built(family)
    rows = [[19, 21], [40]]
    with torch.no_grad():
        packed = model(TOKENS, documents=models.documents(rows))
        alone = [model(part[None])[0] for row, tokens in zip(rows, TOKENS, strict=True) for part in tokens.split(row)]
    assert float((packed.flatten(0, 1) - torch.cat(alone)).abs().max()) < 1e-5


def seen_by_hand(window: int) -> float:
    """Tokens that a token sees on average, counted."""
    return sum(min(place + 1, window) for place in range(TOKENS.shape[1])) / TOKENS.shape[1]


def test_flops_count_what_a_window_leaves() -> None:
    _, args = FAMILIES["olmo3"]
    whole = built("olmo3", window=40).flops_per_token(40, causal=True)
    part = built("olmo3").flops_per_token(40, causal=True)
    assert whole - part == pytest.approx(12 * args.dim * 3 * (seen_by_hand(40) - seen_by_hand(7)))


def test_flops_count_values_by_their_own_size() -> None:
    _, args = FAMILIES["deepseek_v3"]
    longer, shorter = (built("deepseek_v3", v_dim=size).flops_per_token(40) for size in (11, 10))
    a_head = 20 + args.dim + 40  # latent dims, the output, and the tokens that one sees
    assert longer - shorter == 6 * args.n_layers * args.n_heads * a_head


def test_flops_count_the_experts_of_a_token() -> None:
    model = built("glm4_moe", n_dense_layers=2)
    assert [type(block.feed_forward) for block in model.layers] == [FeedForward, FeedForward, Experts, Experts]
    matrices = [p for name, p in model.named_parameters() if p.ndim > 1 and "tok_embeddings" not in name]
    active = sum(p.numel() * (3 / 8 if p.ndim == 3 else 1) for p in matrices)
    attention = 12 * 4 * 4 * 24 * 40
    assert model.flops_per_token(40) == 6 * active + attention
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    model.head.output.weight.requires_grad_()
    head = model.head.output.weight.numel()
    assert model.flops_per_token(40) == pytest.approx(2 * active + attention / 3 + 4 * head)


def test_flops_count_gates_and_states() -> None:
    """A state counts as three matrices for each value head: it is read by a key and a query, and changed."""
    model = built("qwen3_next")
    vectors = vector_names(model)
    matrices = [p for n, p in model.named_parameters() if n not in vectors and "tok_embeddings" not in n]
    active = sum(p.numel() * (2 / 6 if p.ndim == 3 else 1) for p in matrices)
    attention, states = 12 * 2 * 4 * 24 * 40, 6 * 2 * 3 * 4 * 12 * 10
    assert model.flops_per_token(40) == pytest.approx(6 * active + attention + states)


def test_the_plan_counts_what_a_window_leaves() -> None:
    q_TNH, offsets = torch.empty(80, 4, 16, device="meta"), torch.empty(3, device="meta")
    operator, window = SimpleNamespace(overloadpacket="torch_attn._varlen_attn"), [6, 0]
    operands = (q_TNH, q_TNH, q_TNH, offsets, offsets, 40, 40, False, None)
    assert flops_of(operator, (*operands, window), {}, None) == (
        "flash",
        int(4 * q_TNH.numel() * seen_by_hand(7)),
    )
    assert flops_of(operator, operands, {}, None) == ("flash", 4 * q_TNH.numel() * int(seen_by_hand(40)))


def test_the_plan_repeats_blocks_after_their_pattern() -> None:
    assert period_of(Config(), built("olmo3", n_layers=10)) == 4
    assert period_of(Config(), built("qwen3_next", n_layers=8, full_every=4)) == 4
    each_third = ActivationCheckpoint(mode="selective", selective_ac_option=3)
    assert period_of(Config(activation_checkpoint=each_third), built("olmo3", n_layers=10)) == 12


def test_experts_after_dense_layers_are_balanced() -> None:
    model = built("glm4_moe", n_dense_layers=2)
    assert isinstance(model, DecoderOfExperts)
    first, second = model.experts()
    before = second.bias_E.clone()
    model(TOKENS)
    assert [float(load.sum()) for load in model.counters()] == [TOKENS.numel() * 3] * 2
    first.load_E.fill_(1)
    second.load_E.copy_(torch.tensor([1.0, 3, 2, 2, 2, 2, 2, 2]))
    assert model.end_step(torch.tensor(True)) == {"busiest_expert": torch.tensor(1.5)}
    assert (second.bias_E - before).tolist() == pytest.approx([1e-3, -1e-3, 0, 0, 0, 0, 0, 0], abs=1e-7)


@pytest.mark.long
@pytest.mark.usefixtures("single_process_group")
@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_next"])
def test_the_balance_loss_is_that_of_transformers(family: str) -> None:
    model = built(family, balance_loss=0.3)
    models.assert_balance_loss_equal(model, oracle(model), lambda tensors: renamed(model, tensors))


@pytest.mark.usefixtures("single_process_group")
@pytest.mark.parametrize("kind", [Step, ScaledStep])
@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
def test_the_balance_loss_of_sigmoid_scores_is_the_formula(family: str, kind: type[Step]) -> None:
    """With the bias of balance, dense layers and groups; float16 scales the loss."""
    model, plain = (built(family, balance_loss=weight) for weight in (0.3, 0.0))
    batch = {"tokens": TOKENS[:, :-1], "labels": TOKENS[:, 1:]}
    models.assert_balance_loss_is_the_formula(model, plain, batch, kind)


def test_roles_of_experts() -> None:
    """The base has one dense block and one with experts, and of its last kind the others take their values."""
    model = built("glm4_moe")
    found = find_scaling(model, Optimizer(parametrization="completep", base_width=32, base_depth=2))
    roles = {name.partition(".2.")[2]: scaling.role for name, scaling in found.items() if name.startswith("layers.2.")}
    ends = {name for name, role in roles.items() if role == "residual"}
    assert ends == {"attention.wo.weight", "feed_forward.w2", "feed_forward.shared.w2.weight"}
    assert roles["feed_forward.router"] == "output"
    assert roles["feed_forward.w1"] == roles["feed_forward.shared.w3.weight"] == "hidden"
    assert found["layers.0.feed_forward.w2.weight"].role == "residual"
    assert found["layers.1.feed_forward.w1"].initial == found["layers.3.feed_forward.w1"].initial


@pytest.mark.parametrize(
    ("family", "names", "values"),
    [
        ("olmo3", {"attention_norm", "ffn_norm"}, 0.5),
        ("gemma3", {"post_attention_norm", "post_ffn_norm"}, -0.5),  # to which 1 is added
    ],
)
def test_branches_shrink_with_the_depth_by_their_norms(family: str, names: set[str], values: float) -> None:
    model = built(family, n_layers=4, tied_head=False)
    found = find_scaling(model, Optimizer(parametrization="completep", base_width=64, base_depth=2))
    residual = {name: scaling.initial for name, scaling in found.items() if scaling.role == "residual"}
    assert {name.split(".")[2] for name in residual} == names
    bits = torch.zeros(1, dtype=torch.int64)
    assert {float(initial.values(bits, bits)) for initial in residual.values()} == {values}


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("olmo3", {"window": 0}),
        ("olmo3", {"rope_scaling_factor": 0.5}),
        ("gemma3", {"query_pre_attn_scalar": 0}),
        ("gpt_oss", {"full_every": 0}),
        ("olmo3", {"dim": 60, "n_heads": 8, "n_kv_heads": 8}),
        ("smollm3", {"no_rope_every": 0}),
        ("deepseek_v3", {"v_dim": 21}),
        ("deepseek_v3", {"kv_rank": 0}),
        ("deepseek_v3", {"q_rank": -1}),
        ("deepseek_v3", {"rope_dim": 7}),
        ("deepseek_v3", {"n_kv_heads": 2}),
        ("deepseek_v3", {"softmax_scores": True, "n_groups": 2, "n_active_groups": 1}),
        ("glm4_moe", {"rotary_factor": 0.3}),
        ("glm4_moe", {"n_groups": 3}),
        ("qwen3_next", {"rotary_factor": 0.3}),
        ("qwen3_next", {"conv_size": 1}),
        ("qwen3_next", {"full_every": 0}),
        ("qwen3_next", {"shared_hidden_dim": 0}),
        ("qwen3_next", {"n_linear_value_heads": 3}),
        ("glm4_moe", {"n_dense_layers": 5}),
    ],
)
def test_impossible_shapes_are_refused(family: str, changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(changes))):
        replace(FAMILIES[family][1], **changes)


def test_experts_of_deepseek_v2_are_weighed_by_a_softmax() -> None:
    """`test_experts.py` compares such a router with transformers, which has no DeepSeek-V3 with it."""
    args: Any = replace(FAMILIES["deepseek_v3"][1], softmax_scores=True, n_groups=1, n_active_groups=1)
    options = args.experts
    assert (options.scores, options.normalized) == ("softmax", False)
    form = MODELS["deepseek_v3"].formats.hugging_face
    assert form is not None
    with pytest.raises(UserError, match="softmax_scores"):
        form.to_config(args)


@pytest.mark.parametrize(
    ("family", "changes", "named"),
    [
        ("olmo3", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ("olmo3", {"rope_parameters": None, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "linear"),
        ("deepseek_v3", {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "mscale": 0.7}}, "mscale"),
        ("deepseek_v3", {"rope_interleave": False}, "rope_interleave"),
        ("gemma3", {"rope_parameters": None, "rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "yarn"),
        (
            "gemma3",
            {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}, "rope_scaling": None},
            "linear",
        ),
        ("gemma3", {"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ("gemma3", {"attn_logit_softcapping": 30.0}, "attn_logit_softcapping"),
        ("gpt_oss", {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "truncate"),
        ("gpt_oss", {"swiglu_limit": 8.0}, "swiglu_limit"),
        ("smollm3", {"no_rope_layers": [0, 1, 1, 1]}, "no_rope_layers"),
        ("smollm3", {"no_rope_layers": None, "no_rope_layer_interval": 0}, "modulo"),
        ("smollm3", {"layer_types": ["sliding_attention"] * 4}, "layer_types"),
        ("glm4_moe", {"norm_topk_prob": False}, "norm_topk_prob"),
        ("qwen3_next", {"layer_types": ["full_attention", "linear_attention"]}, "layer_types"),
        ("qwen3_next", {"layer_types": ["sliding_attention", "full_attention"]}, "layer_types"),
        ("qwen3_next", {"mlp_only_layers": [1]}, "mlp_only_layers"),
        ("glm4_moe", {"attention_bias": False}, "attention_bias"),
        ("glm4_moe", {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "yarn"),
    ],
)
def test_configs_that_a_family_cannot_compute_are_refused(family: str, changes: dict[str, Any], named: str) -> None:
    model_cls, args = FAMILIES[family]
    hugging_face = model_cls.formats.hugging_face
    assert hugging_face is not None
    config = hugging_face.to_config(args)
    with pytest.raises(ValueError, match=named):
        hugging_face.to_args({**config, **changes})


def test_layers_of_a_family() -> None:
    assert built("gemma3").attentions == [LayerAttention(window=7)] * 5 + [LayerAttention(rope=1)]
    assert built("gpt_oss").attentions == [LayerAttention(window=7), LayerAttention()] * 2
    assert built("olmo3").attentions == [LayerAttention(window=7)] * 3 + [LayerAttention(rope=1)]
    assert built("qwen3_next").attentions == [LayerAttention(rope=None, has_state=True), LayerAttention()] * 2
    assert built("smollm3").attentions == [LayerAttention()] * 3 + [LayerAttention(rope=None)]


def test_latent_dims_grow_with_the_width() -> None:
    old = FAMILIES["deepseek_v3"][1]
    new = old.resized(width=32, depth=2)
    changed = {name: value for name, value in vars(new).items() if value != vars(old)[name]}
    assert changed == {
        "dim": 32, "n_layers": 2, "n_heads": 2, "n_kv_heads": 2, "hidden_dim": 12, "q_rank": 12, "kv_rank": 10,
        "dense_hidden_dim": 48,
    }  # fmt: skip


def test_heads_of_states_grow_with_the_width() -> None:
    old = FAMILIES["qwen3_next"][1]
    new = old.resized(width=128, depth=4)
    changed = {name: value for name, value in vars(new).items() if value != vars(old)[name]}
    assert changed == {
        "dim": 128, "n_heads": 8, "n_kv_heads": 4, "hidden_dim": 80, "shared_hidden_dim": 96, "n_linear_key_heads": 4,
        "n_linear_value_heads": 8,
    }  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_with_a_cache_are_those_of_the_whole_sequence(family: str) -> None:
    model = built(family)
    tokens = TOKENS.flatten()[:50]
    with torch.no_grad():
        whole = model(tokens[None])[0]
    cached = Generator(model, kernels=CpuKernels(), vocab_size=101, max_seq_len=64)
    for end in [3, *range(10, 51)]:  # the first prompts are shorter and longer than the window
        assert torch.allclose(cached.next_logits(tokens[:end].tolist()), whole[end - 1], rtol=1e-4, atol=1e-4), end
        if end == 3:
            cached = Generator(model, kernels=CpuKernels(), vocab_size=101, max_seq_len=64)


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_are_those_of_transformers(family: str) -> None:
    model, prompt = built(family), TOKENS[:1, :9]
    other = oracle(model)
    other.generation_config.eos_token_id = None
    expected = other.generate(prompt, max_new_tokens=40, do_sample=False)[0, 9:].tolist()
    assert len(expected) == 40
    ours = Generator(model, kernels=CpuKernels(), vocab_size=101, max_seq_len=64)
    assert [*ours.stream(prompt[0].tolist(), max_new_tokens=40, sampler=Sampler())] == expected
