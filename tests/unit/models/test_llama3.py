"""Llama 3 against transformers' Llama, and every family against torch's own FLOP counter."""

from dataclasses import fields, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tests.support.families import oracle, renamed
from tests.support.models import SMALL, assert_gradients_equal, assert_steps_equal, built
from titanlite.models.base import Model
from titanlite.models.llama3 import Llama3Args
from titanlite.models.registry import MODELS, resolve_model

SHAPES = {
    "grouped queries": SMALL,
    "one key head": replace(SMALL, n_kv_heads=1),
    "all heads": replace(SMALL, n_kv_heads=4, norm_eps=1e-3),
    "tied head": replace(SMALL, tied_head=True),
    "scaled rope": replace(SMALL, rope_scaling_factor=8.0, rope_theta=500000.0, dim=256),
}


@pytest.mark.parametrize("args", SHAPES.values(), ids=SHAPES)
def test_gradients_equal_those_of_transformers(args: Llama3Args) -> None:
    model = built(args)
    assert_gradients_equal(model, oracle(model), partial(renamed, model))


@pytest.mark.long
@pytest.mark.usefixtures("single_process_group")
def test_twenty_steps_lose_as_much_as_with_transformers() -> None:
    model = built(SMALL, scale=1)
    assert_steps_equal(model, oracle(model))


def test_scaled_rope_equals_that_of_transformers_far_out() -> None:
    args = replace(SHAPES["scaled rope"], max_seq_len=30000)
    model = built(args)
    positions = torch.arange(0, 30000, 997)
    cos, sin = oracle(model).model.rotary_emb(torch.zeros(1, 1, 1), positions[None])
    # Angles of up to 30,000 radians are rounded to 2e-3 in fp32, whoever computes them.
    assert torch.allclose(model.rope_cos[0, positions], cos[0], atol=4e-3)
    assert torch.allclose(model.rope_sin[0, positions], sin[0], atol=4e-3)
    assert not torch.allclose(built(replace(args, rope_scaling_factor=1.0)).rope_cos[0, positions], cos[0], atol=0.1)


FIRST = [(name, next(iter(model.flavors))) for name, model in MODELS.items()]
OTHERS = [(name, flavor) for name, model in MODELS.items() for flavor in model.flavors if (name, flavor) not in FIRST]


def nothing_masked(name: str, flavor: str) -> dict[str, Any]:
    """Let every token see all before it, and values be as long as keys: the counter counts masked scores and zeros.

    No layer has a state, of which the counter counts how it is computed.
    """
    args = MODELS[name].flavors[flavor]
    found = {"window": 1000, "v_dim": getattr(args, "head_size", 0), "n_dense_layers": 0, "full_every": 1}
    return {field.name: found[field.name] for field in fields(args) if field.name in found}


def counted(name: str, flavor: str, n_layers: int, batch: int, seq_len: int) -> tuple[Model, int, int]:
    """The model on the meta device; its operations forward and backward, and how many of them are attention's."""
    size = {"n_layers": n_layers, "max_seq_len": seq_len}
    family, args = resolve_model(name, flavor, size | nothing_masked(name, flavor))
    with torch.device("meta"):
        model = family(args)
        tokens = torch.zeros(batch, seq_len, dtype=torch.int64)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(tokens).sum().backward()
    return model, counter.get_total_flops(), counter.get_flop_counts()["Global"][torch.ops.aten.bmm]


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "flavor"), [*FIRST, *(pytest.param(*case, marks=pytest.mark.nightly) for case in OTHERS)]
)
def test_flops_agree_with_torchs_counter(name: str, flavor: str) -> None:
    """Blocks are alike: counts of one and of two blocks give that of any number."""
    batch, seq_len = 2, 1000
    family, args = resolve_model(name, flavor, nothing_masked(name, flavor))
    _, of_one, attention = counted(name, flavor, 1, batch, seq_len)
    of_two = counted(name, flavor, 2, batch, seq_len)[1]
    others = args.n_layers - 1  # pyright: ignore[reportAttributeAccessIssue]
    total, attention = of_one + others * (of_two - of_one), (others + 1) * attention
    with torch.device("meta"):
        model = family(args)
    assert model.flops_per_token(seq_len) * batch * seq_len == pytest.approx(total, rel=0.02)
    # With a causal mask a position attends to (seq_len + 1) / 2 of seq_len positions on average.
    causal = total - attention * (seq_len - 1) / (2 * seq_len)
    assert model.flops_per_token(seq_len, causal=True) * batch * seq_len == pytest.approx(causal, rel=0.02)
