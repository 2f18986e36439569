"""Qwen3, dense and with experts, against transformers' models."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.support.families import oracle, renamed
from tests.support.helpers import world
from tests.support.models import DENSE, MOE, assert_balance_loss_equal, assert_gradients_equal, built, plain_step
from titanlite.models.qwen3 import Qwen3Args
from titanlite.models.qwen3_moe import Experts, Qwen3Moe
from titanlite.ops.kernels import DEFAULT_KERNELS
from titanlite.optim import build_optimizer
from titanlite.schema import Optimizer

SHAPES = {
    "dense": DENSE,
    "tied": replace(DENSE, tied_head=True, norm_eps=1e-3),
    "experts": MOE,
    "all experts": replace(MOE, n_active_experts=8),
    "tied experts": replace(MOE, n_active_experts=2, tied_head=True),
}


@pytest.mark.parametrize("args", SHAPES.values(), ids=SHAPES)
def test_logits_and_gradients_equal_those_of_transformers(args: Qwen3Args) -> None:
    model = built(args)
    assert_gradients_equal(model, oracle(model), partial(renamed, model))


@pytest.mark.usefixtures("single_process_group")
def test_the_balance_loss_is_that_of_transformers() -> None:
    model = built(replace(MOE, balance_loss=0.3))
    assert_balance_loss_equal(model, oracle(model), partial(renamed, model))
    sums = [buffer for name, buffer in model.named_buffers() if name.endswith("probability_E")]
    assert len(sums) == 2
    assert not torch.stack(sums).any(), "counted anew in each step"


@pytest.mark.parametrize("sizes", [[3, 0, 5, 1], [0, 0, 9, 0]])
def test_a_matmul_for_each_group(sizes: list[int]) -> None:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(9, 6, generator=draw, dtype=torch.float64).requires_grad_()
    weights = torch.randn(4, 6, 5, generator=draw, dtype=torch.float64).requires_grad_()
    ends = torch.tensor(sizes).cumsum(0).to(torch.int32)
    expected = torch.cat([part @ weight for part, weight in zip(x.split(sizes), weights, strict=True)])
    assert torch.equal(DEFAULT_KERNELS.grouped_mm(x, weights, ends), expected)
    assert torch.autograd.gradcheck(lambda a, b: DEFAULT_KERNELS.grouped_mm(a, b, ends), (x, weights))


def test_the_bias_picks_experts_and_does_not_weight_them() -> None:
    experts = built(MOE).get_submodule("layers.0.feed_forward")
    assert isinstance(experts, Experts)
    x = torch.randn(1, 40, 64, generator=torch.Generator().manual_seed(1))
    experts(x)
    assert experts.load_E.sum() == 40 * 2
    experts.load_E.zero_()
    experts.bias_E[3:5] = 100.0  # both at once: every token goes to these, weighted by the softmax of their logits
    found = experts(x)
    assert experts.load_E.tolist() == [0, 0, 0, 40, 40, 0, 0, 0]
    weights = F.linear(x, experts.router[3:5]).softmax(-1)
    parts = [F.silu(x @ experts.w1[e]) * (x @ experts.w3[e]) @ experts.w2[e] for e in (3, 4)]
    expected = weights[..., :1] * parts[0] + weights[..., 1:] * parts[1]
    assert torch.allclose(found, expected, atol=1e-5)
    experts.eval()(x)
    with torch.no_grad():
        experts.train()(x)
    assert experts.load_E.sum() == 80, "only training counts"


@pytest.mark.long
@pytest.mark.usefixtures("single_process_group")
def test_experts_become_equally_busy() -> None:
    """Two of eight experts get every token at first; train with and without the rule."""
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 101, (40, 2, 33), generator=draw)
    busiest = {}
    for rate, steps in ((0.0, 10), (0.3, 40)):
        model = built(replace(MOE, n_layers=1, balance_rate=rate))
        assert isinstance(model, Qwen3Moe)
        for experts in model.experts():
            experts.bias_E[:2] = 4.0
        optimizer = build_optimizer(model, Optimizer(lr=1e-4), seed=0)
        world()
        loads: list[float] = []
        end_step = model.end_step

        def watch(taken: Tensor, model: Qwen3Moe = model, loads: list[float] = loads, then: Any = end_step) -> Any:
            assert all(load.sum() == 2 * 32 * 2 for load in model.counters())
            loads.append(max(float(load.max() / load.mean()) for load in model.counters()))
            return then(taken)

        model.end_step = watch
        for batch in tokens[:steps]:
            step = {"tokens": batch[:, :-1], "labels": batch[:, 1:]}
            plain_step(model, optimizer, max_norm=1.0)([step])
        assert all(load.sum() == 0 for load in model.counters())
        busiest[rate] = sum(loads[-10:]) / 10
    assert busiest[0.0] > 3.5
    assert busiest[0.3] < 1.8


def test_a_skipped_step_moves_no_bias() -> None:
    model = built(MOE)
    assert isinstance(model, Qwen3Moe)
    [first, second] = model.experts()
    for taken, expected in ((False, 0.0), (True, 1e-3)):
        first.load_E.copy_(torch.tensor([0.0, 2, 2, 2, 2, 2, 2, 4]))
        second.load_E.fill_(2)
        assert model.end_step(torch.tensor(taken)) == {"busiest_expert": torch.tensor(2.0)}
        assert first.bias_E.tolist() == pytest.approx([expected, 0, 0, 0, 0, 0, 0, -expected])
        assert not second.bias_E.any()
        assert not first.load_E.any()


def balanced_choices(halves: tuple[slice, slice], *, over_layers: bool) -> tuple[float, list[Tensor]]:
    """Return the balance loss of two routers that choose experts of one half each, and the gradients of their logits,
    computed with float64 by autograd from the definition.

    Args:
        over_layers: whether counts and probabilities are added over layers first, as transformers does.
    """
    logits = []
    for half, seed in zip(halves, (0, 1), strict=True):
        logits.append(torch.randn(64, 8, generator=torch.Generator().manual_seed(seed), dtype=torch.float64))
        logits[-1][:, half] += 6
    leaves = [layer.requires_grad_() for layer in logits]
    groups = [torch.cat(leaves)] if over_layers else leaves
    losses = []
    for logits_TE in groups:
        share_E = F.one_hot(logits_TE.topk(2).indices, 8).sum(dim=1).double().mean(dim=0)
        losses.append(8 * (share_E * logits_TE.softmax(dim=-1).mean(dim=0)).sum())
    loss = torch.stack(losses).mean()
    loss.backward()
    return float(loss.detach()), [leaf.grad for leaf in leaves if leaf.grad is not None]


def test_each_layer_has_a_balance_loss_of_its_own() -> None:
    """Routers on complementary halves of the experts: together they choose all alike, and neither is balanced."""
    model = built(replace(MOE, balance_loss=1.0))
    assert isinstance(model, Qwen3Moe)
    halves = slice(0, 4), slice(4, 8)
    expected, gradients = balanced_choices(halves, over_layers=False)
    together, _ = balanced_choices(halves, over_layers=True)
    assert expected > 3.9
    assert together < 2.1
    layers, logits = model.experts(), []
    for layer, half, seed in zip(layers, halves, (0, 1), strict=True):
        x_TE = torch.randn(64, 8, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).float()
        x_TE[:, half] += 6
        logits.append(F.pad(x_TE, (0, 56)).requires_grad_())
        layer.router.data = torch.eye(8, 64)  # so that the first dims of inputs are the logits
    outs = [layer(x_TD[None]) for layer, x_TD in zip(layers, logits, strict=True)]
    tokens = torch.tensor(64)
    model.before_backward(1 / tokens, tokens, lambda _: None)
    (0 * torch.stack([out.sum() for out in outs]).sum()).backward()
    for found, wanted in zip(logits, gradients, strict=True):
        assert found.grad is not None
        assert found.grad[:, :8].double().allclose(wanted, rtol=1e-4, atol=1e-6 * float(wanted.abs().max()))
    assert float(model.end_step(torch.tensor(True))["balance_loss"]) == pytest.approx(expected, rel=1e-5)


def test_the_metric_of_the_balance_loss_is_of_all_tokens_that_the_step_has_summed() -> None:
    """Also where gradients are those of a worker's own tokens (`outer.over_replicas`): the counters are of all."""
    one, other, both = (built(replace(MOE, balance_loss=0.1)) for _ in range(3))
    x_BLD = torch.randn(2, 40, 64, generator=torch.Generator().manual_seed(0))
    x_BLD[1] += 1
    for model, part in ((one, x_BLD[:1]), (other, x_BLD[1:]), (both, x_BLD)):
        assert isinstance(model, Qwen3Moe)
        for layer in model.experts():
            layer(part)
    for counter, its in zip(one.counters(), other.counters(), strict=True):
        counter += its
    values = [float(model.end_step(torch.tensor(True))["balance_loss"]) for model in (one, other, both)]
    assert values[0] == pytest.approx(values[2], rel=1e-5)
    assert abs(values[1] - values[2]) > 1e-3


def test_impossible_shapes_are_explained() -> None:
    for change, message in (
        ({"head_dim": 7}, r"head_dim\b.*\b7$"),
        ({"n_active_experts": 1}, r"n_active_experts\b.*\b1\b.*\b2\b"),
        ({"n_active_experts": 9}, r"n_active_experts\b.*n_experts \(8\).*\b9$"),
        ({"n_layers": 0}, r"n_layers\b.*\b0$"),
        ({"balance_loss": -0.1}, r"balance_loss\b.*-0\.1$"),
    ):
        with pytest.raises(ValueError, match=message):
            replace(MOE, **change)


def test_buffers_are_made_where_they_are_computed_with() -> None:
    """Offload keeps parameters on the CPU, and buffers on the device."""
    model = built(MOE)
    with torch.device("meta"):
        model.init_buffers()
    assert {buffer.device.type for buffer in model.buffers()} == {"meta"}
