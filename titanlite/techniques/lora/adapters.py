"""Low-rank adaptation (LoRA, arXiv:2106.09685): a frozen model, and small trained adapters in its linear layers.

A layer with an adapter computes W x + (alpha / rank) B (A x), with A [rank, in] and B [out, rank]. B begins as zero, so
the first step computes what the base does. A and B are parameters of the layer: `<layer>.lora_a` and `<layer>.lora_b`.
No name of the base changes. So sharding, initial values, the optimizer and checkpoints treat adapters like any other
parameters.
"""

from collections.abc import Iterable
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from titanlite.models.base import AddsParameters, Model, head_of, unique_parameters
from titanlite.models.initial import Constant, InitialValues, Uniform
from titanlite.models.layers import Linear
from titanlite.optim.groups import collapse_names
from titanlite.runtime.errors import ConfigError, Problem
from titanlite.schema import Lora
from titanlite.techniques.freeze import freeze_parameters

LORA_A, LORA_B = "lora_a", "lora_b"


class LoraLinear(AddsParameters, Linear):
    """Linear layer with an adapter.

    Args:
        base: layer whose weight and bias it takes over.
    """

    added = (LORA_A, LORA_B)

    def __init__(self, base: nn.Linear, *, rank: int, alpha: float) -> None:
        with torch.device("meta"):  # a weight that is replaced at once
            super().__init__(base.in_features, base.out_features)
        self.weight, self.bias = base.weight, base.bias
        self.lora_a = nn.Parameter(self.weight.new_empty(rank, base.in_features))
        self.lora_b = nn.Parameter(self.weight.new_empty(base.out_features, rank))
        self.scale = alpha / rank

    def forward(self, x: Tensor) -> Tensor:
        out = self.kernels.linear(x, self.weight)
        return self.add_bias(out) + self.kernels.linear(self.kernels.linear(x, self.lora_a) * self.scale, self.lora_b)

    def added_values(self, name: str) -> InitialValues:
        """A is uniform as in PEFT, within 1 / sqrt(in); B is zero."""
        bound = self.in_features**-0.5
        return Uniform(low=-bound, high=bound) if name == LORA_A else Constant(0.0)


def add_adapters(model: Model, lora: Lora, *, dtype: str | None) -> None:
    """Put in adapters, and freeze all other parameters. In place.

    Args:
        model: may be on the meta device.
        dtype: name of the dtype of the frozen parameters; None keeps theirs.

    Raises:
        ConfigError: a pattern matches nothing that it can be for, or the rank is too large.
    """
    assert lora.rank is not None
    base = [parameter for _, parameter in unique_parameters(model)]
    layers = target_layers(model, lora)
    adapters = {name: LoraLinear(layer, rank=lora.rank, alpha=lora.alpha) for name, layer in layers.items()}
    for name, adapter in adapters.items():
        model.set_submodule(name, adapter)
    freeze_parameters(base, dtype=dtype)


def target_layers(model: Model, lora: Lora) -> dict[str, nn.Linear]:
    """Return the layers that get an adapter, by name.

    Raises:
        ConfigError: a pattern matches no such layer, or the rank is larger than a layer.
    """
    assert lora.rank is not None
    in_head = {*head_of(model).modules()}
    linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    known = {name: layer for name, layer in linears.items() if layer not in in_head}
    patterns = lora.targets or ["layers.*"]
    if problems := [problem for pattern in patterns if (problem := _why_not(model, pattern, known, linears))]:
        raise ConfigError([Problem("lora.targets", problem) for problem in problems])
    layers = {n: layer for n, layer in known.items() if any(fnmatchcase(n, pattern) for pattern in patterns)}
    _check_layers(layers, lora.rank)
    return layers


def _why_not(model: Model, pattern: str, known: Iterable[str], linears: Iterable[str]) -> str | None:
    """Return the reason why a pattern cannot be a target; None if it can."""

    def matching(names: Iterable[str]) -> list[str]:
        return [name for name in names if fnmatchcase(name, pattern)]

    there = f"there are {', '.join(collapse_names(known))}"
    if outside := [name for name in matching(linears) if name not in known]:
        return f"{pattern} matches {outside[0]}, whose matmul the loss computes; {there}"
    if matching(known):
        return None
    parameters = dict(unique_parameters(model))
    if stacks := [name for name in matching(parameters) if parameters[name].ndim == 3]:
        return f"{pattern} matches {stacks[0]}, a stack of experts' weights, which get no adapters; {there}"
    if others := [*matching(name for name, _ in model.named_modules()), *matching(parameters)]:
        return f"{pattern} matches {others[0]}, which is no linear layer; {there}"
    return f"{pattern} matches no linear layer; {there}"


def _check_layers(layers: dict[str, nn.Linear], rank: int) -> None:
    """Raise ConfigError for layers of a class of the user's own, and for a rank larger than a layer."""
    for name, layer in layers.items():
        if type(layer) not in (Linear, nn.Linear):
            what = f"{name} is a {type(layer).__name__}, whose forward an adapter does not know: leave it out"
            raise ConfigError([Problem("lora.targets", what)])
        if rank > min(layer.in_features, layer.out_features):
            sizes = f"{layer.out_features} x {layer.in_features}"
            what = f"{rank} is more than {name} has: its weight is {sizes}; lower it, or leave the layer out of"
            raise ConfigError([Problem("lora.rank", f"{what} lora.targets")])
