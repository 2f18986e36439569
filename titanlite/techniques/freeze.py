"""Frozen parameters: no gradient, no optimizer state, the same bits at every step."""

from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from titanlite.runtime.errors import ConfigError, Problem
from titanlite.schema import Config, Freeze
from titanlite.techniques.technique import Claim, Technique, reads

if TYPE_CHECKING:
    from torch import nn

    from titanlite.models.base import Model


class FrozenParameters(Technique):
    option = "freeze.parameters"

    def is_used(self, config: Config) -> bool:
        return bool(config.freeze.parameters)

    def claims(self, config: Config) -> dict[Claim, str]:
        return {Claim.TRAINED: self.option}

    @reads("freeze")
    def choose_trained(self, model: "Model", config: Config) -> None:
        freeze(model, config.freeze)

    def summary(self, config: Config) -> str:
        return f"frozen parameters {', '.join(config.freeze.parameters)}"

    def resume_settings(self, config: Config) -> dict[str, Any]:
        return {"freeze.parameters": sorted(config.freeze.parameters)}


def freeze(model: "Model", config: Freeze) -> None:
    """Freeze the parameters of a model that `freeze.parameters` names, in place. Frozen and trainable parameters can
    share an FSDP unit.

    Args:
        model: may be on the meta device. A shared parameter has the name of its first place.

    Raises:
        ConfigError: a pattern matches no parameter, or nothing is left to train.
    """
    from titanlite.models.base import unique_parameters
    from titanlite.optim.groups import collapse_names

    parameters = dict(unique_parameters(model))
    names = {pattern: [name for name in parameters if fnmatchcase(name, pattern)] for pattern in config.parameters}
    if unknown := [pattern for pattern, found in names.items() if not found]:
        there = ", ".join(collapse_names(parameters))
        problems = [f"{pattern} matches no parameter; there are {there}" for pattern in unknown]
        raise ConfigError([Problem("freeze.parameters", problem) for problem in problems])
    frozen = {name for found in names.values() for name in found}
    if len(frozen) == len(parameters):
        raise ConfigError([Problem("freeze.parameters", "matches every parameter: nothing is left to train")])
    freeze_parameters((parameters[name] for name in frozen), dtype=config.dtype)


def freeze_parameters(parameters: "Iterable[nn.Parameter]", *, dtype: str | None) -> None:
    """Freeze parameters in place.

    Args:
        dtype: name of their new dtype; None keeps theirs.
    """
    from titanlite.runtime.dtypes import torch_dtype

    for parameter in parameters:
        parameter.requires_grad_(False)
        if dtype is not None:
            parameter.data = parameter.data.to(torch_dtype(dtype))


TECHNIQUE = FrozenParameters()
