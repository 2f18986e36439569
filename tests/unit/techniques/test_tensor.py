"""Tensor parallelism on one process: what is refused, by which line, and the split loss."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.helpers import mentions, world
from tests.support.layouts import CountOperators
from titanlite.models.base import DECODER, Model, TensorPlan, build_on_meta
from titanlite.models.llama3 import Llama3, Llama3Args
from titanlite.models.qwen3 import Qwen3, Qwen3Args
from titanlite.models.qwen3_moe import Qwen3Moe
from titanlite.runtime.errors import UserError
from titanlite.techniques.tensor.layers import TensorRanks, check_tensor, roles_of, split_dims

ARGS = Llama3Args(dim=48, n_layers=2, n_heads=6, n_kv_heads=3, hidden_dim=72, vocab_size=264, max_seq_len=64)


def split_parameters(model: Model) -> set[str]:
    modules = dict(model.named_modules())
    return {f"{name}.{dim}" for name, role in roles_of(model).items() for dim in split_dims(modules[name], role)}


def refusal(model: Model, degree: int) -> str:
    with pytest.raises(UserError) as caught:
        check_tensor(model, degree)
    return str(caught.value)


def llama(plan: TensorPlan = DECODER, *, args: Llama3Args = ARGS) -> Model:
    return build_on_meta(type("Own", (Llama3,), {"tensor_plan": plan, "draws_random": False}), args)


def test_experts_are_split_by_their_hidden_dims() -> None:
    moe = build_on_meta(Qwen3Moe, Qwen3Moe.flavors["debug"])
    check_tensor(moe, 2)
    assert mentions(refusal(moe, 4), "2 key/value heads", "layers.0.attention", "set 2")
    layer = moe.get_submodule("layers.0.feed_forward")
    assert split_dims(layer, roles_of(moe)["layers.0.feed_forward"]) == {"w1": 2, "w2": 1, "w3": 2}
    whole = {name for name, _ in moe.named_parameters() if name.startswith("layers.0.feed")} - split_parameters(moe)
    assert whole == {"layers.0.feed_forward.router"}
    odd = build_on_meta(Qwen3Moe, replace(Qwen3Moe.flavors["debug"], hidden_dim=191))
    assert mentions(refusal(odd, 2), 191, "layers.0.feed_forward", "set 1")


def test_uneven_sizes_are_refused_with_the_fix() -> None:
    check_tensor(llama(), 3, seq_len=63)
    whole = llama({name: role for name, role in DECODER.items() if role != "tokens"})
    check_tensor(whole, 3, seq_len=64)
    with pytest.raises(UserError, match=r" 64 .*training\.seq_len"):
        check_tensor(llama(), 3, seq_len=64)
    assert mentions(refusal(llama(), 2), "3 key/value heads", "layers.0.attention", "set 1")
    assert mentions(refusal(llama(), 6), "3 key/value heads", "layers.0.attention", "set 3")
    assert mentions(refusal(llama(), 5), 264, "model.args.vocab_size = 265")
    uneven = build_on_meta(Qwen3, Qwen3Args(dim=48, n_layers=1, n_heads=2, n_kv_heads=2, hidden_dim=9, vocab_size=8))
    assert mentions(refusal(uneven, 2), 9, "layers.0.feed_forward.w1", "set 1")


def test_models_and_tables_that_are_wrong() -> None:
    assert mentions(refusal(llama({}), 2), "tensor_plan", "Own", "docs/add_a_model.md")
    drawing = build_on_meta(type("Dropping", (Llama3,), {}), ARGS)
    assert mentions(refusal(drawing, 3), "Dropping", "random")
    for pattern, role, words in (
        ("layers.*.attention.wo", "row", ["layers.*.attention.wo", "'row'", "tokens", "split"]),
        ("head.output", "columns", ["head", "vocabulary"]),
        ("layers.*.feed_forward", "experts", ["layers.0.feed_forward", "ExpertLayer", "hidden_dims"]),
    ):
        plan: Any = {**DECODER, pattern: role}
        assert mentions(refusal(llama(plan), 3), "Own.tensor_plan", *words)
    without: Any = {name: role for name, role in DECODER.items() if name != "layers.*.feed_forward"}
    assert mentions(refusal(llama(without), 3), "layers.0.feed_forward.w1")
    biased = llama()
    biased.layers[1].feed_forward.w2 = nn.Linear(72, 48, device="meta")  # pyright: ignore[reportAttributeAccessIssue]
    assert mentions(refusal(biased, 3), "layers.1.feed_forward.w2", "bias")


@pytest.mark.long
@pytest.mark.usefixtures("single_process_group")
def test_sums_over_ranks() -> None:
    """Add nothing with one rank. There is one collective all the same: in forward, or in backward."""
    ranks = TensorRanks(0, 1, world().group_name)
    x = torch.tensor([3.0, 1.0], requires_grad=True)
    for function, forward, backward in ((ranks.total, 1, 0), (ranks.enter, 0, 1)):
        for call in (function, torch.compile(function, backend="aot_eager", fullgraph=True)):
            x.grad = None
            y = call(x)
            assert torch.equal(y, x)
            (y * torch.tensor([5.0, 7.0])).sum().backward()
            assert x.grad is not None
            assert x.grad.tolist() == [5.0, 7.0]
        with CountOperators("_c10d_functional.all_reduce") as operators:
            y = function(x)
            assert operators.count == forward
            y.sum().backward()
            assert operators.count == forward + backward
    assert ranks.largest(x.detach()).tolist() == [3.0, 1.0]
    place, is_here = TensorRanks(1, 3, "").place(torch.tensor([3, 4, 7, 8]), 4)
    assert (place.tolist(), is_here.tolist()) == ([0, 0, 3, 0], [False, True, True, False])
