"""Width and depth transfer: options tuned on a small model suit a larger one (muP, CompleteP).

`optim/parametrization.py` has the rules. This file finds what they need of each parameter: its role, which the model
declares, how much larger the model is than the base, and the initial values that the parameter has at the base size.
"""

import re
from collections.abc import Iterator
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, ClassVar

from titanlite.runtime.errors import ConfigError, Problem
from titanlite.schema import Config
from titanlite.techniques.technique import Conflict, Technique, reads

if TYPE_CHECKING:
    from torch import nn

    from titanlite.models.base import Model, Role, Scaling
    from titanlite.schema import Optimizer


_LAYER = re.compile(r"(?<=^layers\.)\d+")


class Parametrization(Technique):
    option = "optimizer.parametrization"

    def is_used(self, config: Config) -> bool:
        return config.optimizer.parametrization != "standard"

    @reads("optimizer", "lora")
    def conflicts(self, config: Config) -> Iterator[Conflict]:
        optimizer, rule = config.optimizer, config.optimizer.parametrization
        needed = {"base_width": rule != "standard", "base_depth": rule == "completep"}
        for option, is_needed in needed.items():
            value = getattr(optimizer, option)
            if is_needed and value is None:
                yield f"optimizer.{option}", f"is needed by parametrization = {rule!r}: the size that was tuned"
            if value is not None and not is_needed:
                yield f"optimizer.{option}", f"does nothing with parametrization = {rule!r}: leave it out"
        if self.is_used(config) and config.lora.rank is not None:
            yield self.option, f"{rule!r} has no rule for adapters: leave it out with lora.rank"

    @reads("optimizer")
    def choose_trained(self, model: "Model", config: Config) -> None:
        if self.is_used(config):
            model.scaling = find_scaling(model, config.optimizer)

    def summary(self, config: Config) -> str:
        optimizer = config.optimizer
        depth = f", depth {optimizer.base_depth}" if optimizer.base_depth else ""
        return f"{optimizer.parametrization} from width {optimizer.base_width}{depth}"

    def resume_settings(self, config: Config) -> dict[str, Any]:
        options = "parametrization", "base_width", "base_depth"
        return {
            f"optimizer.{option}": value
            for option in options
            if (value := getattr(config.optimizer, option)) is not None
        }

    facts: ClassVar[dict[str, Any]] = {"role": None, "initial_std": None, "eps": None}
    """Role of the parameter, standard deviation of its initial values (None if they give none), and AdamW's eps."""

    def parameter_facts(self, model: "Model", config: Config) -> "dict[nn.Parameter, dict[str, Any]]":
        from titanlite.optim.groups import parameter_groups

        return {
            parameter: {
                "role": model.scaling[name].role,
                "initial_std": getattr(model.scaling[name].initial, "std", None),
                "eps": group.eps,
            }
            for group in (parameter_groups(config.optimizer, model) if model.scaling else ())
            for name, parameter in group.parameters.items()
        }


def find_scaling(model: "Model", optimizer: "Optimizer") -> "dict[str, Scaling]":
    """Return the scaling of every parameter of a model on the meta device.

    Raises:
        ConfigError: the model has no base of this size, or shares weights that need different factors.
    """
    from titanlite.models.base import Scaling, head_of, initial_values, unique_parameters, vector_names
    from titanlite.models.registry import ModelSpec
    from titanlite.ops.kernels import in_every_pass
    from titanlite.optim.parametrization import adamw_factors

    kind, head = type(model), {*head_of(model).parameters()}
    parameters = dict(unique_parameters(model))
    vectors = vector_names(model)
    roles: dict[str, Role] = {name: role_of(model, name, is_vector=name in vectors) for name in parameters}
    shared = [name for name, parameter in parameters.items() if parameter in head and roles[name] == "input"]
    if shared:
        problem = f"cannot be used with a head that shares {shared[0]}: untie them (model.args.tied_head = false)"
        raise ConfigError([Problem("optimizer.parametrization", problem)])
    if optimizer.base_depth is not None and "residual" not in roles.values():
        problem = f"{kind.__name__}.roles names no residual parameters, which completep needs (docs/add_a_model.md)"
        raise ConfigError([Problem("optimizer.parametrization", problem)])
    layers, further = sum(map(in_every_pass, model.layers)), getattr(model, "further_weight", 0.0)
    width, depth = optimizer.base_width or 0, optimizer.base_depth or layers
    try:
        args = model.args.resized(width=width, depth=depth)
    except ValueError as error:
        raise ConfigError([Problem("optimizer.base_width", f"{width} does not fit the model: {error}")]) from error
    base = ModelSpec(kind, args).build()
    if further:
        base.predict_further(further)  # pyright: ignore[reportCallIssue]
    names_in_base = {name: _LAYER.sub(lambda number: str(int(number[0]) * depth // layers), name) for name in roles}
    of_base = dict(unique_parameters(base))
    alike = {_LAYER.sub("", name): name for name in of_base}  # where a block of the base is of another kind
    names_in_base = {
        name: base_name if base_name in of_base else alike.get(_LAYER.sub("", base_name), base_name)
        for name, base_name in names_in_base.items()
    }
    missing = [name for name in names_in_base.values() if name not in of_base]
    inputs = [name for name, role in roles.items() if role == "input"]
    if missing or not inputs:
        lacks = f"of the base size has no {missing[0]}" if missing else "has no input matrix, which gives its width"
        raise ConfigError([Problem("optimizer.parametrization", f"{kind.__name__} {lacks} (docs/add_a_model.md)")])
    growth = parameters[inputs[0]].numel() / of_base[inputs[0]].numel()
    found = {}
    for name in parameters:
        values = initial_values(base, names_in_base[name], of_base[names_in_base[name]].shape)
        scaling = Scaling(
            role=roles[name],
            is_matrix=name not in vectors,
            in_layers=name.startswith("layers."),
            width=growth,
            depth=1.0 if name.startswith(f"layers.{layers}.") else layers / depth,  # a `FurtherToken` is one block
            initial=values,
        )
        factor = adamw_factors(scaling).std
        found[name] = scaling if factor == 1 else replace(scaling, initial=values.scaled(factor))
    return found


def role_of(model: "Model", name: str, *, is_vector: bool) -> "Role":
    """Return the role of a parameter in width and depth transfer.

    Defaults where `Model.roles` has none: those of `vector_names` are vectors, others are hidden in `layers`, output in
    the head and input elsewhere.
    """
    for pattern, role in model.roles.items():
        if fnmatchcase(name, pattern):
            return role
    if is_vector:
        return "vector"
    if name.startswith("layers."):
        return "hidden"
    return "output" if name.startswith(f"{[*dict(model.named_children())][-1]}.") else "input"


TECHNIQUE = Parametrization()
