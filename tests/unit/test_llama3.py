"""Llama 3 against exact parameter counts, against transformers' Llama, and against torch's own FLOP counter."""

from dataclasses import replace

import pytest
import torch
import transformers
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from titanlite.errors import ConfigError
from titanlite.models.base import parameter_generator
from titanlite.models.llama3 import Llama3, Llama3Args
from titanlite.models.registry import resolve_model

COUNTS = {
    "1B": 1_235_814_400,
    "3B": 3_212_749_824,
    "8B": 8_030_261_248,
    "70B": 70_553_706_496,
    "405B": 405_853_388_800,
}
SMALL = Llama3Args(
    dim=64, n_layers=2, n_heads=4, n_kv_heads=2, hidden_dim=96, vocab_size=101, max_seq_len=64, rope_theta=10000.0,
    rope_scaling_factor=1.0,
)  # fmt: skip
SHAPES = {
    "grouped queries": SMALL,
    "one key head": replace(SMALL, n_kv_heads=1),
    "all heads": replace(SMALL, n_kv_heads=4, norm_eps=1e-3),
    "tied head": replace(SMALL, tied_head=True),
    "scaled rope": replace(SMALL, rope_scaling_factor=8.0, rope_theta=500000.0, dim=256),
    "scaled rope of 3.2": replace(SMALL, rope_scaling_factor=32.0, rope_theta=500000.0, dim=512, tied_head=True),
}


def built(args: Llama3Args) -> Llama3:
    model = Llama3(args)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            model.init_weight(name, parameter, parameter_generator(0, name, torch.device("cpu")))
            if parameter.ndim == 2:
                parameter.mul_(5)  # so that attention is far from uniform
    model.init_buffers()
    return model


def oracle(model: Llama3) -> transformers.LlamaForCausalLM:
    args = model.args
    rope = {"rope_type": "default", "rope_theta": args.rope_theta}
    if args.rope_scaling_factor != 1:
        rope |= {
            "rope_type": "llama3",
            "factor": args.rope_scaling_factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
    config = transformers.LlamaConfig(
        vocab_size=args.vocab_size, hidden_size=args.dim, intermediate_size=args.hidden_dim,
        num_hidden_layers=args.n_layers, num_attention_heads=args.n_heads, num_key_value_heads=args.n_kv_heads,
        rms_norm_eps=args.norm_eps, max_position_embeddings=131072, tie_word_embeddings=args.tied_head,
        rope_parameters=rope,
    )  # fmt: skip
    other = transformers.LlamaForCausalLM(config)
    names = {
        "tok_embeddings": "model.embed_tokens", "layers": "model.layers", "attention_norm": "input_layernorm",
        "attention": "self_attn", "wq": "q_proj", "wk": "k_proj", "wv": "v_proj", "wo": "o_proj",
        "ffn_norm": "post_attention_layernorm", "feed_forward": "mlp", "w1": "gate_proj", "w2": "down_proj",
        "w3": "up_proj", "output": "lm_head",
    }  # fmt: skip
    state = {}
    for name, value in model.state_dict().items():
        renamed = ".".join(names.get(part, part) for part in name.replace("head.norm", "model.norm").split("."))
        state[renamed.replace("head.lm_head", "lm_head")] = value
    missing = other.load_state_dict(state, strict=False)
    assert not missing.unexpected_keys
    assert not missing.missing_keys
    return other.float().eval()


@pytest.mark.parametrize("flavor", COUNTS)
def test_parameter_counts(flavor: str) -> None:
    model, args = resolve_model("llama3", flavor, {})
    with torch.device("meta"):
        assert sum(parameter.numel() for parameter in model(args).parameters()) == COUNTS[flavor]


def test_debug_flavor_is_about_eleven_million() -> None:
    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in Llama3(Llama3.flavors["debug"]).parameters())  # pyright: ignore
    assert 10.5e6 < count < 11.5e6


@pytest.mark.parametrize("args", SHAPES.values(), ids=SHAPES)
def test_logits_equal_those_of_transformers(args: Llama3Args) -> None:
    model = built(args)
    tokens = torch.randint(0, args.vocab_size, (2, 64), generator=torch.Generator().manual_seed(1))
    ours = model(tokens)
    theirs = oracle(model)(tokens).logits
    assert ours.std() > 0.1
    assert (ours - theirs).abs().max() < 1e-5 * theirs.abs().max().clamp(min=1)


def test_scaled_rope_equals_that_of_transformers_far_out() -> None:
    args = replace(SHAPES["scaled rope"], max_seq_len=30000)
    model = built(args)
    positions = torch.arange(0, 30000, 997)
    cos, sin = oracle(model).model.rotary_emb(torch.zeros(1, 1, 1), positions[None])
    # Angles of up to 30,000 radians are rounded to 2e-3 in fp32, whoever computes them.
    assert torch.allclose(model.rope_cos[positions], cos[0], atol=4e-3)
    assert torch.allclose(model.rope_sin[positions], sin[0], atol=4e-3)
    assert not torch.allclose(built(replace(args, rope_scaling_factor=1.0)).rope_cos[positions], cos[0], atol=0.1)


def test_attention_is_causal() -> None:
    model = built(SMALL)
    tokens = torch.randint(0, 101, (1, 32), generator=torch.Generator().manual_seed(1))
    changed = tokens.clone()
    changed[0, 20] += 1
    difference = (model(tokens) - model(changed)).abs().amax(dim=-1)[0]
    assert (difference[:20] == 0).all()
    assert (difference[20:] > 0).all()


def test_loss_gets_hidden_states_and_weight() -> None:
    model = built(SMALL)
    tokens = torch.randint(0, 101, (2, 16))
    logits = model(tokens, loss=lambda hidden, weight: F.linear(hidden, weight))
    assert torch.equal(logits, model(tokens))


@pytest.mark.parametrize("seq_len", [32, 128, 512])
@pytest.mark.parametrize("tied", [False, True])
def test_flops_agree_with_torchs_counter(seq_len: int, tied: bool) -> None:
    args = replace(SMALL, max_seq_len=seq_len, dim=128, hidden_dim=256, tied_head=tied)
    model = built(args)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:  # it cannot count the CPU's kernel
        model(torch.zeros(2, seq_len, dtype=torch.int64)).sum().backward()
    assert model.flops_per_token(seq_len) * 2 * seq_len == pytest.approx(counter.get_total_flops(), rel=0.02)


def test_unknown_names_are_explained() -> None:
    cases: list[tuple[str, str, dict[str, object], str]] = [
        ("lama3", "8B", {}, "model.name: unknown value 'lama3', did you mean llama3?"),
        ("llama3", "8b", {}, "model.flavor: unknown value '8b', did you mean 8B?"),
        ("llama3", "8B", {"n_layer": 3}, "model.args.n_layer: unknown key 'n_layer', did you mean n_layers?"),
        ("llama3", "8B", {"n_layers": 3.5}, "model.args.n_layers: expected int, got 3.5"),
        ("llama3", "8B", {"n_heads": 3}, "model.args: dim 4096 must be a multiple of 2 x n_heads (3)"),
    ]
    for name, flavor, overrides, message in cases:
        with pytest.raises(ConfigError) as error:
            resolve_model(name, flavor, overrides)
        assert str(error.value).startswith(message)


def test_weights_have_no_value_by_accident() -> None:
    with pytest.raises(ValueError, match=r"no initial value is defined for parameter layers\.0\.gate"):
        built(SMALL).init_weight("layers.0.gate", torch.zeros(3), torch.Generator())
