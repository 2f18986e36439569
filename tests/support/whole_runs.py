"""A run on this process alone, with its weights and its optimizer's state to compare."""

import torch
from torch import nn

from tests.support.helpers import TinyRun, train_on_this_rank
from tests.support.layouts import whole
from titanlite.models.registry import resolve_model
from titanlite.schema import Config
from titanlite.train import Run


def trained(config: Config) -> dict[str, torch.Tensor]:
    """Train, and return the weights and the optimizer state at the end, by name."""
    return values_of(train_on_this_rank(config, 0, 1))


def values_of(run: Run) -> dict[str, torch.Tensor]:
    """Return the weights and the optimizer state of a run, by name."""
    names: dict[torch.Tensor, str] = {parameter: name for name, parameter in run.model.named_parameters()}
    moments = {
        f"{names[parameter]}.{key}": whole(value)
        for parameter, state in run.optimizer.state.items()
        for key, value in state.items()
    }
    return {name: whole(parameter) for parameter, name in names.items()} | moments


def assert_equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


def parameters_of(tiny: TinyRun, options: list[str]) -> list[nn.Parameter]:
    """Parameters of a run's model, on the meta device."""
    model_cls, args = resolve_model("llama3", None, tiny.config(*options).model.args)
    with torch.device("meta"):
        return [*model_cls(args).parameters()]
