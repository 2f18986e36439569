"""Checks of a model on the meta device: what a class of the user's own must define, and what the data asks of it."""

import torch

from titanlite.models.base import (
    ExpertLayer,
    Model,
    initial_values,
    trainable_parameters,
    unique_parameters,
)
from titanlite.optim.groups import parameter_groups
from titanlite.optim.quantized import block_size_of, is_quantized_size
from titanlite.optim.registry import constructor_options, find_optimizer_cls
from titanlite.runtime.errors import UserError
from titanlite.runtime.hash_random import random_bits, salt
from titanlite.schema import Degrees, Optimizer, Parallelism
from titanlite.techniques.tensor.layers import roles_of, split_dims


def check_own_model(model: Model) -> None:
    """Check that a model of the user's own defines all its methods and gives every parameter its initial values.

    Args:
        model: on the meta device.

    Raises:
        UserError: a method is missing, or `init_weight` fails or returns no distribution.
    """
    name = type(model).__name__
    for method in ("forward", "init_weight", "flops_per_token"):
        if getattr(type(model), method) is getattr(Model, method):
            raise UserError(f"{name} does not define {method}: see docs/add_a_model.md")
    for name, parameter in unique_parameters(model):
        values = initial_values(model, name, parameter.shape)
        indices = torch.arange(min(parameter.numel(), 1000))
        try:
            found = values.values(random_bits(salt(name), indices), indices)
            assert found.shape == indices.shape
            assert found.isfinite().all()
        except Exception as error:  # code of the user's own may raise anything
            reason = "" if isinstance(error, AssertionError) else f": {type(error).__name__}: {error}"
            kind = type(values).__name__
            raise UserError(f"{kind}.values must return a finite number for each index of {name}{reason}") from error


def check_quantized_moments(model: Model, optimizer: Optimizer, parallelism: Parallelism, world_size: int) -> None:
    """Check that no moments in 8 or 4 bits are of parameters that further axes of the mesh shard by columns.

    Args:
        optimizer: has passed `check_optimizer`.

    Raises:
        UserError: a parameter has such moments.
    """
    columns = _sharded_by_columns(model, parallelism.degrees(world_size), parallelism.expert_parallel_degree)
    for group in parameter_groups(optimizer, trainable_parameters(model)):
        optimizer_cls = find_optimizer_cls(group.name)
        block_size = block_size_of(optimizer_cls, constructor_options(optimizer_cls, optimizer, group.args))
        for name in group.parameters if block_size else ():
            axis, shards = columns.get(name, ("", 1))
            if axis and is_quantized_size(group.parameters[name].numel() // shards, block_size or 1):
                raise UserError(
                    f"{optimizer_cls.__name__} cannot keep moments of {name}, whose columns "
                    f"parallelism.{axis}_parallel_degree shards: give it an [[optimizer.groups]] with another "
                    f"optimizer, or set that degree to {shards if axis == 'expert' else 1}"
                )


def _sharded_by_columns(model: Model, degrees: Degrees, experts: int) -> dict[str, tuple[str, int]]:
    """Return the parameters that are not sharded by their first dimension alone: the axis, and their shards."""
    found: dict[str, tuple[str, int]] = {}
    modules = dict(model.named_modules())
    for name, role in roles_of(model).items() if degrees.tensor > 1 else ():
        for attribute, dim in split_dims(modules[name], role).items():
            shape = modules[name].get_parameter(attribute).shape
            if dim or (degrees.sharded > 1 and len(shape) > 1 and shape[1] % degrees.sharded == 0):
                found[f"{name}.{attribute}"] = "tensor", degrees.sharded * degrees.tensor
    if degrees.sharded > experts > 1:
        layers = ((name, layer) for name, layer in modules.items() if isinstance(layer, ExpertLayer))
        found |= {f"{name}.{stack}": ("expert", degrees.sharded) for name, layer in layers for stack in layer.stacks}
    return found
