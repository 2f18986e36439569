"""AdamW that rounds stochastically, against PyTorch's; and what an optimizer is told by a tensor."""

from typing import Any

import pytest
import torch
from torch import nn

from tests.distributed.test_layouts import on_every_layout, trained
from tests.helpers import TinyRun, run_ranks
from titanlite.config.schema import Optimizer
from titanlite.optim import RoundingAdamW, _hash, build_optimizer, round_stochastically, update

STEPS = 5


def toy(dtype: torch.dtype = torch.float32) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(40, 30).to(dtype)


def gradients(model: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)


@pytest.mark.parametrize("size", [2**24, 100])
def test_in_float32_it_is_adamw(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr("titanlite.optim.SLICE", size)
    ours, theirs = toy(), toy()
    options: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    first = RoundingAdamW(
        [{"params": [*ours.parameters()]}], dict(ours.named_parameters()), state_dtype=torch.float32, seed=0, **options
    )
    second = torch.optim.AdamW(theirs.parameters(), fused=True, **options)
    for step in range(STEPS):
        for model, optimizer in ((ours, first), (theirs, second)):
            gradients(model, step)
            optimizer.step()
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        pairs = [(mine, other), *((first.state[mine][name], value) for name, value in second.state[other].items())]
        for one, two in pairs:  # at the ends of slices the kernel rounds otherwise
            assert torch.equal(one, two) if size > 1200 else torch.allclose(one, two, rtol=1e-6, atol=1e-9)


def test_bfloat16_follows_float32_on_average() -> None:
    """Steps of which each is below half of bfloat16's resolution: rounded to the nearest, nothing would ever move."""
    count, steps = 20_000, 200
    weight = nn.Parameter(torch.ones(count, 1, dtype=torch.bfloat16))
    optimizer = RoundingAdamW(
        [{"params": [weight]}], {"weight": weight}, state_dtype=torch.bfloat16, seed=0,
        lr=1e-4, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0,
    )  # fmt: skip
    for _ in range(steps):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    assert (torch.ones(1, dtype=torch.bfloat16) - torch.tensor(1e-4, dtype=torch.bfloat16)).item() == 1
    moved = 1 - weight.float().mean().item()
    assert moved == pytest.approx(steps * 1e-4, rel=0.02)
    state = optimizer.state[weight]
    assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == torch.bfloat16
    assert state["exp_avg_sq"].float().mean().item() == pytest.approx(1 - 0.999**steps, rel=0.02)


def test_rounding_is_right_on_average_and_exact_where_it_can_be() -> None:
    bits = _hash(torch.tensor(7), 0, 100_000)
    for value in (1 + 2**-9, -3.3, 1e-30, 7.123e20):
        rounded = round_stochastically(torch.full((len(bits),), value), bits).double()
        assert len(rounded.unique()) == 2
        assert rounded.mean().item() == pytest.approx(value, rel=2e-5)
    exact = torch.tensor([0.0, 1.0, -2.5, float("inf"), float("nan")])
    assert round_stochastically(exact, bits[:5]).float().nan_to_num(5).tolist() == exact.nan_to_num(5).tolist()


def test_random_bits_are_of_the_place_in_the_whole_tensor() -> None:
    whole = _hash(torch.tensor(3), 0, 1000)
    assert torch.equal(_hash(torch.tensor(3), 400, 50), whole[400:450])
    assert not torch.equal(_hash(torch.tensor(4), 0, 1000), whole)
    for shift in (0, 16, 32):
        part = ((whole >> shift) & 0xFFFF).double() / 2**16
        assert part.mean().item() == pytest.approx(0.5, abs=0.03)
        assert part.std().item() == pytest.approx(12**-0.5, abs=0.02)


@pytest.mark.parametrize("kind", ["fused AdamW", "rounding AdamW", "plain SGD"])
def test_a_step_that_is_skipped_leaves_everything(kind: str) -> None:
    model = toy(torch.bfloat16 if kind == "rounding AdamW" else torch.float32)
    if kind == "plain SGD":
        optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    else:
        optimizer = build_optimizer(model, Optimizer(lr=0.1), seed=0)
    assert isinstance(optimizer, RoundingAdamW) == (kind == "rounding AdamW")

    def everything() -> list[torch.Tensor]:
        states = [value for parameter in model.parameters() for value in optimizer.state[parameter].values()]
        return [tensor.detach().clone() for tensor in [*model.parameters(), *states] if tensor is not None]

    for step, skip in enumerate([False, False, True, False]):
        gradients(model, step)
        if skip:
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.grad[0] = torch.nan
        before = everything()
        update(optimizer, skip=torch.tensor(skip))
        after = everything()
        if step:  # before the first there is no state
            equal = [torch.equal(old, new) for old, new in zip(before, after, strict=True)]
            assert all(equal) if skip else not any(equal)
    assert all(tensor.isfinite().all() for tensor in everything())


LOW = ["--training.dtype=bfloat16", "--optimizer.state_dtype=bfloat16", "--training.mixed_precision_param=bfloat16"]


@pytest.mark.slow
def test_bfloat16_runs_are_equal_on_every_layout_and_after_a_resume(tiny: TinyRun) -> None:
    results = on_every_layout(trained, tiny, *LOW)
    reference = tiny.losses("run-1-1")
    assert reference[-1] < 4.5
    for replicate, shard in results:
        assert tiny.losses(f"run-{replicate}-{shard}") == pytest.approx(reference, rel=2e-3)
    [whole] = results[1, 1]
    run_ranks(trained, 1, tiny.config("--job.name=halves", "--training.steps=3", *LOW))
    [resumed] = run_ranks(trained, 1, tiny.config("--job.name=halves", *LOW))
    assert all((resumed[name] == value).all() for name, value in whole.items())
