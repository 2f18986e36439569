"""The outer optimizer on one process: its values, where it does nothing, its state in checkpoints."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import deepcopy
from functools import partial
from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.helpers import TinyRun, built, mentions
from tests.support.whole_runs import assert_equal, values_of
from tests.unit.techniques.test_average import checkpoint, stored, trained
from titanlite.optim import set_learning_rate
from titanlite.runtime.dtensor import own_part
from titanlite.runtime.errors import UserError
from titanlite.schedule import learning_rate
from titanlite.schema import Outer
from titanlite.step import count_valid_tokens
from titanlite.techniques.outer.optimizer import OuterOptimizer
from titanlite.techniques.technique import nothing

TAKEN, SKIPPED = torch.tensor(0), torch.tensor(1)
INNER: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": partial(torch.optim.SGD, lr=0.1, momentum=0.5),
    "AdamW": partial(torch.optim.AdamW, lr=0.05),
}
THREE = "--outer.every=3"


def loop_around(weights: Sequence[Tensor], steps: Iterable[int], *, every: int) -> None:
    """Let PyTorch's SGD make a step on the weights after each round of steps."""
    around = [weight.clone() for weight in weights]
    sgd = torch.optim.SGD(around, lr=0.7, momentum=0.9, nesterov=True)
    for step in steps:
        if step % every == 0:
            for weight, outer in zip(weights, around, strict=True):
                outer.grad = outer - weight
            sgd.step()
            for weight, outer in zip(weights, around, strict=True):
                weight.copy_(outer)


def seven_steps(model: nn.Module, inner: str) -> Iterator[int]:
    """Train on the same data in every call, and yield the number of each step after it."""
    optimizer, generator = INNER[inner](model.parameters()), torch.Generator().manual_seed(1)
    for step in range(1, 8):
        inputs = torch.randn(16, 5, generator=generator)
        optimizer.zero_grad()
        (model(inputs) - inputs[:, :3]).square().mean().backward()
        optimizer.step()
        yield step


@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("every", [1, 3])
def test_it_is_sgd_with_nesterov_momentum_around_a_plain_loop(inner: str, every: int) -> None:
    torch.manual_seed(0)
    model = nn.Linear(5, 3)
    plain = deepcopy(model)
    outer = OuterOptimizer(Outer(every=every), model)
    outer.begin()
    for step in seven_steps(model, inner):
        outer.update(step, TAKEN, nothing)
    loop_around([weight.detach() for weight in plain.parameters()], seven_steps(plain, inner), every=every)
    for weight, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(weight, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.long
@pytest.mark.usefixtures("single_process_group")
def test_a_run_is_a_plain_loop_around_its_steps(tiny: TinyRun) -> None:
    """The losses are those of weights after the outer steps, and the average contains them, too."""
    run = trained(tiny, "outer", "--outer.every=2", "--average.window=1", "--average.freq=6")
    inner = built(0, 1, tiny.config("--job.name=inner"))
    losses = []

    def steps() -> Iterator[int]:
        for step in range(1, 7):
            lr = learning_rate(step, peak=inner.config.optimizer.lr, end=6, config=inner.config.lr_scheduler)
            set_learning_rate(inner.optimizer, lr)
            result = inner.train_step(list(islice(inner.batches, inner.position.micro_batches.count(step))))
            losses.append(float(result.loss))
            yield step

    loop_around([own_part(weight) for weight in inner.model.parameters()], steps(), every=2)
    inner.batches.close()
    assert tiny.losses("outer") == pytest.approx(losses, rel=1e-6)
    expected = values_of(inner)
    assert run.state.average
    for name, weight in run.model.named_parameters():
        torch.testing.assert_close(own_part(weight), expected[name], rtol=1e-5, atol=1e-6)
        assert torch.equal(run.state.average.value(name), own_part(weight))


@pytest.mark.long
@pytest.mark.usefixtures("single_process_group")
def test_with_a_rate_of_one_and_no_momentum_no_bit_differs(tiny: TinyRun) -> None:
    same = values_of(trained(tiny, "same", "--outer.every=2", "--outer.lr=1", "--outer.momentum=0"))
    assert_equal(same, values_of(trained(tiny, "plain")))
    assert tiny.losses("same") == tiny.losses("plain")


def test_a_skipped_step_ends_no_round_and_other_skipped_steps_count() -> None:
    model = nn.Linear(2, 3)
    outer = OuterOptimizer(Outer(every=2), model)
    outer.begin()
    began, before = model.weight.detach().clone(), deepcopy(outer.tensors)
    model.weight.detach().add_(1.0)
    for step, skip_reason in ((1, TAKEN), (2, SKIPPED), (3, SKIPPED)):
        outer.update(step, skip_reason, nothing)
        assert all(torch.equal(tensor, before[name]) for name, tensor in outer.tensors.items()), step
        assert torch.equal(model.weight, began + 1), step
    outer.update(4, TAKEN, nothing)
    torch.testing.assert_close(model.weight.detach(), began + 0.7 * 1.9)


def test_bfloat16_weights_are_rounded_outer_weights_which_do_not_drift() -> None:
    model = nn.Linear(64, 3, bias=False, dtype=torch.bfloat16)
    outer = OuterOptimizer(Outer(every=1, momentum=0.0), model)
    outer.begin()
    began = model.weight.detach().clone()
    model.weight.detach().mul_(1.25)
    moved = model.weight.detach() - began.double()
    for step in (1, 2):  # nothing moves in the second round
        outer.update(step, TAKEN, nothing)
        weights = outer.tensors["weights.weight"]
        torch.testing.assert_close(weights.double(), began + 0.7 * moved, rtol=1e-6, atol=1e-7)
        assert torch.equal(model.weight, weights.bfloat16()), step
        assert not torch.equal(weights, weights.bfloat16().float()), "float32"


def test_only_trained_parameters_have_outer_weights() -> None:
    model = nn.Linear(2, 3)
    model.bias.requires_grad = False
    assert OuterOptimizer(Outer(every=1), model).tensors.keys() == {"begun", "weights.weight", "momentum.weight"}


@pytest.mark.long
@pytest.mark.usefixtures("single_process_group")
def test_a_run_that_stopped_within_a_round_has_the_bits_of_one_that_did_not(tiny: TinyRun) -> None:
    """Also a branch of it."""
    trained(tiny, "whole", THREE)
    trained(tiny, "parts", THREE, "--training.steps=4")
    parts = '--checkpoint.initial_load=["model", "optimizer", "outer", "progress"]'
    trained(tiny, "branch", THREE, parts, f"--checkpoint.initial_load_path={checkpoint(tiny, 'parts', 4)}")
    trained(tiny, "parts", THREE)
    whole = dict(stored(checkpoint(tiny, "whole", 6)))
    momentum = [tensor for name, tensor in whole.items() if name.startswith("outer.momentum.")]
    assert len(momentum) == len([name for name in whole if name.startswith("model.")])
    assert all(tensor.any() for tensor in momentum)
    for name in ("parts", "branch"):
        assert_equal(dict(stored(checkpoint(tiny, name, 6))), whole)


@pytest.mark.long
@pytest.mark.usefixtures("single_process_group")
def test_a_run_that_the_guard_stops_at_the_end_of_a_round_saves_the_step_before(
    tiny: TinyRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loss of step 3 is not finite, and a run that resumes makes that step with the outer weights of its round."""
    trained(tiny, "whole", THREE)
    counts: list[float] = []

    def counted(*arguments: Any) -> Tensor:
        counts.append(math.nan if len(counts) == 2 else 1)
        return count_valid_tokens(*arguments) * counts[-1]

    with monkeypatch.context() as patch:
        patch.setattr("titanlite.step.count_valid_tokens", counted)
        trained(tiny, "stopped", THREE)
    assert checkpoint(tiny, "stopped", 2).exists()
    trained(tiny, "stopped", THREE)
    assert_equal(dict(stored(checkpoint(tiny, "stopped", 6))), dict(stored(checkpoint(tiny, "whole", 6))))


@pytest.mark.long
@pytest.mark.usefixtures("single_process_group")
def test_a_run_begins_or_ends_to_have_one_only_if_it_may(
    tiny: TinyRun, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("titanlite.run.run_folder._lock", lambda path: None)  # a refused run holds its folder
    caplog.set_level("INFO")
    allowed, steps = '--checkpoint.allow_changes=["outer.every"]', "--training.steps="

    def at(step: int) -> dict[str, Any]:
        return dict(stored(checkpoint(tiny, "later", step)))

    trained(tiny, "later", f"{steps}3")
    with pytest.raises(UserError, match=r"outer\.every"):
        trained(tiny, "later", f"{steps}4", "--outer.every=2")
    trained(tiny, "later", f"{steps}4", "--outer.every=2", allowed)
    assert any(mentions(line, "outer", "step 3") for line in caplog.messages)
    before, after = at(3), at(4)
    for name in (name for name in before if name.startswith("model.")):
        momentum = after[name.replace("model.", "outer.momentum.", 1)]
        torch.testing.assert_close(before[name] - after[name], 0.7 * 1.9 * momentum, rtol=1e-4, atol=1e-6)
    with pytest.raises(UserError, match=r"outer\.every"):
        trained(tiny, "later", f"{steps}5")
    trained(tiny, "later", f"{steps}5", allowed)
    assert at(5).keys() == before.keys()
