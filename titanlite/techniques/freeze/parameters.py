"""Frozen parameters: no gradient, no optimizer state, the same bits at every step."""

from collections.abc import Iterable
from fnmatch import fnmatchcase

from torch import nn

from titanlite.models.base import Model, unique_parameters
from titanlite.optim.groups import collapse_names
from titanlite.runtime.dtypes import torch_dtype
from titanlite.runtime.errors import ConfigError, Problem
from titanlite.schema import Freeze


def freeze(model: Model, config: Freeze) -> None:
    """Freeze the parameters of a model that `freeze.parameters` names, in place. Frozen and trainable parameters can
    share an FSDP unit.

    Args:
        model: may be on the meta device. A shared parameter has the name of its first place.

    Raises:
        ConfigError: a pattern matches no parameter, or nothing is left to train.
    """
    if not config.parameters:
        return
    parameters = dict(unique_parameters(model))
    frozen = matching(parameters, config)
    if len(frozen) == len(parameters):
        raise ConfigError([Problem("freeze.parameters", "matches every parameter: nothing is left to train")])
    freeze_parameters(frozen.values(), dtype=config.dtype)


def freeze_parameters(parameters: Iterable[nn.Parameter], *, dtype: str | None) -> None:
    """Freeze parameters in place.

    Args:
        dtype: name of their new dtype; None keeps theirs.
    """
    for parameter in parameters:
        parameter.requires_grad_(False)
        if dtype is not None:
            parameter.data = parameter.data.to(torch_dtype(dtype))


def matching(parameters: dict[str, nn.Parameter], config: Freeze) -> dict[str, nn.Parameter]:
    """Return the parameters that `freeze.parameters` names.

    Raises:
        ConfigError: a pattern matches no parameter.
    """
    problems = [
        Problem(
            "freeze.parameters", f"{pattern} matches no parameter; there are {', '.join(collapse_names(parameters))}"
        )
        for pattern in config.parameters
        if not any(fnmatchcase(name, pattern) for name in parameters)
    ]
    if problems:
        raise ConfigError(problems)
    return {
        name: parameter
        for name, parameter in parameters.items()
        if any(fnmatchcase(name, pattern) for pattern in config.parameters)
    }
