"""The gated delta rule against the recurrence that defines it, and layers that keep documents apart to the bit."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.families import built, oracle
from tests.support.helpers import mentions
from tests.support.models import documents
from tests.support.operators import OperatorNames
from tests.support.plans import planned
from titanlite.models.base import Model
from titanlite.models.decoder import Decoder
from titanlite.models.delta_net import GatedDeltaNet
from titanlite.ops import delta_rule
from titanlite.ops.cpu import CpuKernels
from titanlite.ops.delta_rule import CHUNK, gated_delta_rule
from titanlite.runtime.errors import UserError
from titanlite.techniques.context.sequences import check_context
from titanlite.techniques.reproducible.parts import check_parts
from titanlite.techniques.tensor.layers import check_tensor
from titanlite.tools.cli import run
from titanlite.tools.convert.generation import Generator

TOKENS = torch.randint(0, 101, (2, 150), generator=torch.Generator().manual_seed(0))
SHORT = TOKENS[:, :40]


def drawn(tokens: int) -> list[Tensor]:
    """Queries, keys of length 1, values, decays and betas of two sequences and three heads, in float64."""
    draw = torch.Generator().manual_seed(tokens)
    q, k, v = (torch.randn(2, 3, tokens, dims, generator=draw).double() for dims in (5, 5, 4))
    decay, beta = (torch.rand(2, 3, tokens, generator=draw).double() for _ in range(2))
    return [tensor.requires_grad_() for tensor in (q, torch.nn.functional.normalize(k, dim=-1), v, -decay, beta)]


def by_recurrence(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, *, positions: Tensor | None
) -> tuple[Tensor, Tensor]:
    state, outs = q.new_zeros(2, 3, 5, 4), []
    for token in range(q.shape[2]):
        if positions is not None:
            state = state * (positions[:, token] > 0).view(-1, 1, 1, 1)
        state = state * decay[:, :, token, None, None].exp()
        key = k[:, :, token, None]
        state = state + key.mT @ (beta[:, :, token, None, None] * (v[:, :, token, None] - key @ state))
        outs.append(q[:, :, token, None] @ state / 5**0.5)
    return torch.cat(outs, dim=2), state


@pytest.mark.parametrize(
    "rows",
    [
        [[1], [1]],
        [[CHUNK - 1], [CHUNK - 1]],
        [[CHUNK + 1], [CHUNK + 1]],
        [[3, 61, 1, 85], [150]],
        [[64, 64, 22], [1, 149]],
    ],
)
@pytest.mark.parametrize("within_documents", [False, True])
def test_chunks_compute_the_recurrence(rows: list[list[int]], within_documents: bool) -> None:
    inputs = drawn(sum(rows[0]))
    positions = documents(rows).positions_BL if within_documents else None
    found = gated_delta_rule(*inputs, positions_BL=positions)
    expected = by_recurrence(*inputs, positions=positions)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    upstream = torch.randn_like(found[0])
    ours, theirs = (torch.autograd.grad(output, inputs, upstream) for output in (found[0], expected[0]))
    torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-8)


def test_a_state_goes_on() -> None:
    inputs = drawn(150)
    whole = gated_delta_rule(*inputs)
    first, second = ([tensor[:, :, part] for tensor in inputs] for part in (slice(70), slice(70, None)))
    out, state = gated_delta_rule(*first)
    more, state = gated_delta_rule(*second, state_BNKV=state)
    torch.testing.assert_close((torch.cat([out, more], dim=2), state), whole, rtol=1e-9, atol=1e-9)


def delta_nets(model: Decoder) -> list[GatedDeltaNet]:
    return [module for module in model.modules() if isinstance(module, GatedDeltaNet)]


def apart(model: Decoder) -> float:
    """Largest difference of logits to transformers."""
    other = oracle(model)
    with torch.no_grad():
        return float((model(SHORT) - other(SHORT).logits).abs().max())


@pytest.mark.long
def test_decays_of_the_other_sign_show(monkeypatch: pytest.MonkeyPatch) -> None:
    model = built("qwen3_next")
    for layer in delta_nets(model):
        layer.a_log.data -= 4  # or the states would grow beyond float32
    assert apart(model) < 1e-5

    def grows(q: Any, k: Any, v: Any, decay: Tensor, beta: Any, **options: Any) -> Any:
        return gated_delta_rule(q, k, v, -decay, beta, **options)

    monkeypatch.setattr(delta_rule, "gated_delta_rule", grows)
    assert apart(model) > 1e-3


def changed_by_another_document(model: Decoder, first: int = 70) -> list[bool]:
    """Whether other tokens in the first document of a sequence change the logits of the first and the second."""
    other = TOKENS.clone()
    other[0, :first] = (other[0, :first] + 1) % 101
    where = documents([[first, 150 - first], [150]])
    with torch.no_grad():
        found, changed = (model(tokens, documents=where)[0] for tokens in (TOKENS, other))
    return [not torch.equal(found[part], changed[part]) for part in (slice(first), slice(first, None))]


def state_is_not_reset(layer: GatedDeltaNet, patch: Callable[..., None]) -> None:
    patch(delta_rule, "gated_delta_rule", lambda *inputs, positions_BL, **more: gated_delta_rule(*inputs, **more))


def convolutions_are_not_reset(layer: GatedDeltaNet, patch: Callable[..., None]) -> None:
    convolve = layer._convolve
    patch(layer, "_convolve", lambda x_BNLC, conv_NCW, positions_BL: convolve(x_BNLC, conv_NCW, None))


@pytest.mark.long
@pytest.mark.parametrize("first", [1, 64, 70])
def test_documents_are_apart_to_the_bit(first: int) -> None:
    """Every token takes both experts: the bits of a matmul may depend on the number of its rows."""
    model = built("qwen3_next", n_experts=2, max_seq_len=150)
    assert changed_by_another_document(model, first) == [True, False]


@pytest.mark.long
@pytest.mark.parametrize("plant", [state_is_not_reset, convolutions_are_not_reset])
def test_what_is_not_reset_shows(plant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = built("qwen3_next", n_experts=2, max_seq_len=150)
    plant(delta_nets(model)[0], monkeypatch.setattr)
    assert changed_by_another_document(model) == [True, True]


@pytest.mark.parametrize(
    ("check", "what"),
    [
        (partial(check_tensor, degree=4, seq_len=8), "2 key heads of layers.0.attention: set 2"),
        (partial(check_context, degree=4), "4 does not divide the 2 key heads of layers.0.attention.*: set 2"),
        (partial(check_context, degree=2, tensor=2), "2 x tensor_parallel_degree 2 does not divide the 2 .*: set 1"),
        (check_parts, "layers.0.attention.conv, a parameter outside of .* debug.reproducible_context_degree .*: set 1"),
    ],
)
def test_degrees_that_do_not_fit_are_refused(check: Callable[[Model], None], what: str) -> None:
    model = built("qwen3_next", n_heads=4, n_kv_heads=4, vocab_size=104)
    with pytest.raises(UserError, match=f"{what}$"):
        check(model)
    check_context(model, degree=2)
    check_tensor(model, degree=2, seq_len=8)


@pytest.mark.long
def test_a_token_after_the_cache_costs_one_token() -> None:
    """However long the sequence is."""
    model = built("qwen3_next", max_seq_len=150)
    generator = Generator(model, kernels=CpuKernels(), vocab_size=101, max_seq_len=150)
    tokens = TOKENS[0].tolist()
    counts = []
    for length in (40, 41, 139, 140):
        if length == 139:
            generator = Generator(model, kernels=CpuKernels(), vocab_size=101, max_seq_len=150)
        with OperatorNames() as operators:
            generator.next_logits(tokens[:length])
        counts.append(len(operators.names))
    assert counts[1] == counts[3]
    assert counts[2] > counts[0]  # more chunks
    past = delta_nets(model)[0].past
    assert past is not None
    assert {name: state.shape[1:] for name, state in past.items()} == {"state": (4, 12, 10), "inputs": (2, 3, 44)}


NEXT = (
    "--model={name='qwen3_next', args={dim=64, n_layers=2, n_heads=2, n_kv_heads=2, head_dim=32, hidden_dim=32, "
    "full_every=2, n_linear_key_heads=4, n_linear_value_heads=8, linear_key_dim=8, linear_value_dim=16, n_experts=4, "
    "n_active_experts=2, shared_hidden_dim=32, vocab_size=512}}"
)


@pytest.mark.long
def test_a_plan_counts_the_exchange_of_tokens_for_heads() -> None:
    """Queries, keys, values, betas and decays before the convolutions, and outputs behind the rule, in bfloat16; in
    backward their gradients."""
    tokens, dims = 16 * 64 // 8, (2 * 4 * 8 + 8 * 16 + 2 * 8) + 8 * 16
    found = planned(NEXT, "--parallelism.context_parallel_degree=2", world_size=8)
    assert found.traffic["all_to_all", "context"] == 2 * tokens * dims * torch.bfloat16.itemsize


def test_a_plan_refuses_degrees_that_do_not_fit_the_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "small.toml"
    config.write_text("[model]\nname = 'qwen3_next'\nargs = {vocab_size = 512}\n")
    words = ["plan", str(config), "--world-size=8", "--gpu=H100", "--parallelism.tensor_parallel_degree=4"]
    assert run(words) == 2
    assert mentions(capsys.readouterr().err, "parallelism.tensor_parallel_degree", 4, 2)
