"""Updates within backward: configs that are refused, steps that are skipped, and the plan."""

import math
import re
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

from tests.support.helpers import TinyRun
from tests.support.models import plain_step
from titanlite.optim import build_optimizer
from titanlite.optim.norm import gradient_norms
from titanlite.runtime.errors import UserError
from titanlite.runtime.private_torch.tensors import local_tensor
from titanlite.schema import Optimizer
from titanlite.techniques.in_backward import check_offloaded_update
from titanlite.techniques.in_backward.updates import StepInBackward

ON = ("--optimizer.in_backward=true", "--training.max_norm=0")
NAN = math.nan


OFFLOADED = (*ON, "--training.enable_cpu_offload")


@pytest.mark.parametrize("version", ["2.11.0+cu128", "2.12.1"])
def test_versions_that_do_not_wait_for_offloaded_gradients_are_refused(tiny: TinyRun, version: str) -> None:
    with pytest.raises(UserError, match=rf"\b{re.escape(version)} .*\b2\.13\b"):
        check_offloaded_update(tiny.config(*OFFLOADED), torch.device("cuda"), torch_version=version)


@pytest.mark.parametrize(
    ("options", "device", "version"),
    [
        (OFFLOADED, "cuda", "2.13.0"),
        (OFFLOADED, "cpu", "2.12.1"),
        (ON, "cuda", "2.12.1"),
        (["--training.enable_cpu_offload"], "cuda", "2.12.1"),
    ],
)
def test_others_update_from_whole_gradients(tiny: TinyRun, options: Sequence[str], device: str, version: str) -> None:
    check_offloaded_update(tiny.config(*options), torch.device(device), torch_version=version)


class Tied(nn.Module):
    """One weight, used twice, and one that is used once."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(8, 8, bias=False)
        self.last = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(torch.relu(self.first(x)))).square().mean()


def states(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    values = [value for parameter in model.parameters() for value in optimizer.state[parameter].values()]
    return [tensor.detach().clone() for tensor in [*model.parameters(), *values]]


@pytest.mark.usefixtures("single_process_group")
@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_each_parameter_is_updated_once_by_its_whole_gradient(name: str) -> None:
    config = Optimizer(name=name, lr=0.1, args={"momentum": 0.9} if name == "SGD" else {})
    whole, parts = Tied(), Tied()
    ordinary, within = (build_optimizer(model, config, seed=0) for model in (whole, parts))
    in_backward = plain_step(parts, within, StepInBackward)
    for step in range(4):
        x = torch.randn(5, 8, generator=torch.Generator().manual_seed(step))
        whole(x).backward()
        gradients = [parameter.grad for parameter in whole.parameters() if parameter.grad is not None]
        loss = parts(x)
        in_backward.before_backward(loss.detach())
        loss.backward()
        assert all(parameter.grad is None for parameter in parts.parameters())
        found = in_backward.norms([], [])
        assert len(found) == 3
        assert all(map(torch.equal, found.values(), gradient_norms(gradients)))
        ordinary.step()
        ordinary.zero_grad()
        assert all(map(torch.equal, states(parts, within), states(whole, ordinary)))


class HalfUsed(nn.Linear):
    """Linear whose bias has no gradient at first."""

    uses_bias = False

    def forward(self, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return functional.linear(x, self.weight, self.bias if self.uses_bias else None).square().mean()


@pytest.mark.usefixtures("single_process_group")
def test_a_unit_with_a_parameter_without_gradient_is_updated_at_the_end() -> None:
    model = HalfUsed(8, 8)
    fully_shard(model)
    optimizer = build_optimizer(model, Optimizer(lr=0.1), seed=0)
    in_backward = plain_step(model, optimizer, StepInBackward)
    for uses_bias in (False, True, False):
        model.uses_bias = uses_bias
        before = [local_tensor(parameter).detach().clone() for parameter in (model.weight, model.bias)]
        in_backward.before_backward(torch.zeros(()))
        model(torch.ones(2, 8)).backward()
        assert len(in_backward.norms([], [])) == 1 + uses_bias
        after = [local_tensor(parameter) for parameter in (model.weight, model.bias)]
        assert [not torch.equal(*pair) for pair in zip(before, after, strict=True)] == [True, uses_bias]
        assert model.weight.grad is None


@pytest.mark.usefixtures("single_process_group")
@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_nonfinite_losses_and_gradients_are_not_used(name: str) -> None:
    """A nonfinite loss updates nothing; a nonfinite gradient skips its own parameter only."""
    model = Tied()
    optimizer = build_optimizer(model, Optimizer(name=name, lr=0.1), seed=0)
    in_backward = plain_step(model, optimizer, StepInBackward)
    poison = False
    model.last.bias.register_hook(lambda gradient: gradient * NAN if poison else None)

    def moved(loss: float) -> list[bool]:
        before = [parameter.detach().clone() for parameter in model.parameters()]
        in_backward.before_backward(torch.tensor(loss))
        model(torch.ones(2, 8)).backward()
        assert len(in_backward.norms([], [])) == 3
        assert all(parameter.isfinite().all() for parameter in model.parameters())
        return [not torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True)]

    assert moved(1.0) == [True, True, True]
    assert moved(NAN) == [False, False, False]
    assert moved(math.inf) == [False, False, False]
    poison = True
    assert moved(1.0) == [True, True, False]
