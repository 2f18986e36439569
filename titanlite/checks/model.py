"""Checks of a model on the meta device: what a class of the user's own must define, and what the data asks of it."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from titanlite.models.base import (
    ExpertLayer,
    Model,
    expert_layers,
    initial_values,
    trainable_parameters,
    unique_parameters,
)
from titanlite.models.registry import ModelSpec
from titanlite.ops.attention import Documents
from titanlite.optim.groups import parameter_groups
from titanlite.optim.quantized import block_size_of, is_quantized_size
from titanlite.optim.registry import constructor_options, find_optimizer_cls
from titanlite.runtime.errors import UserError
from titanlite.runtime.hash_random import random_bits, salt
from titanlite.schema import Data, Degrees, Optimizer, Parallelism
from titanlite.techniques.tensor import check_tensor, roles_of, split_dims

SMALL = 1 << 25
"""Parameters of a model of the user's own that is tried on the CPU with values."""
SMALL_VOCABULARY = 256
SMALL_LENGTH = 64
"""Tokens of a sequence that such a model is tried on."""


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


def check_documents(model: Model, data: Data) -> None:
    """Check that a model can keep documents apart.

    Raises:
        UserError: it cannot, and `data.document_mask` asks for it.
    """
    if data.document_mask and not _takes_documents(model):
        raise UserError(
            f"true needs a model whose forward takes `documents`, and {type(model).__name__}.forward does not: add the "
            "argument and mask attention by it (docs/add_a_model.md), or set data.document_mask = false"
        )


def check_documents_apart(spec: ModelSpec) -> None:
    """Try a model on two documents in one sequence, at a small size on the CPU.

    Other tokens in the first must not change the logits of the second.

    A model whose small size is unknown, or fails, is not tried.

    Raises:
        UserError: they do.
    """
    if (model := small_model(spec)) is None:
        return
    length = min(SMALL_LENGTH, spec.args.max_seq_len)
    first = length // 2 - 1  # no multiple of a block of tokens
    places = torch.arange(length)
    ids = (places >= first).int()
    documents = Documents((places - first * ids)[None], ids[None], torch.tensor([0, first, length], dtype=torch.int32))
    vocabulary = min(SMALL_VOCABULARY, spec.args.vocab_size)
    tokens = places[None] % vocabulary
    other = torch.where(places < first, (tokens + vocabulary // 2) % vocabulary, tokens)
    try:
        with torch.no_grad():
            found, changed = (model(it, documents=documents)[0, first:].float() for it in (tokens, other))
    except Exception:  # code of the user's own may raise anything; training itself shows what
        return
    if not torch.allclose(found, changed, rtol=1e-3, atol=1e-3 * float(found.abs().max()), equal_nan=True):
        name = spec.model_cls.__name__
        raise UserError(
            f"{name} does not keep documents apart: other tokens in the first document of a sequence change the logits "
            "of the second. Mask attention by `documents` (docs/add_a_model.md), or set data.document_mask = false"
        )


def small_model(spec: ModelSpec) -> Model | None:
    """Return a model with random values on the CPU, of few blocks and tokens; None if it cannot be made small.

    No value is special, as the zeros are that some layers begin with, which hide what the layer depends on.
    """
    for args in _smaller(spec):
        try:
            small = spec._replace(args=args).build()
            if sum(parameter.numel() for parameter in small.parameters()) > SMALL:
                continue
            small.to_empty(device="cpu")
            small.init_buffers()
        except Exception:  # code of the user's own may raise anything
            continue
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for _, parameter in unique_parameters(small):
                _fill(parameter, generator)
        return small.eval()
    return None


def _smaller(spec: ModelSpec) -> list[Any]:
    """Return arguments of the model with its own blocks and with fewer, then of its other flavors with fewer."""
    changes = {"vocab_size": min(SMALL_VOCABULARY, spec.args.vocab_size)}
    depth = getattr(spec.args, "n_layers", 0)
    found: list[Any] = []
    for args in (spec.args, *spec.model_cls.flavors.values()):
        for blocks in [it for it in (depth, 4, 2, 1) if it <= depth] if depth else [None]:
            try:
                found.append(replace(args, **changes, **({} if blocks is None else {"n_layers": blocks})))
            except Exception:  # an impossible combination
                continue
    return found


def _fill(parameter: Tensor, generator: torch.Generator) -> None:
    """Fill matrices so that they keep the size of activations, and other parameters around 1."""
    if parameter.dim() > 1:
        parameter.normal_(0, parameter.shape[-1] ** -0.5, generator=generator)
    else:
        parameter.normal_(1, 0.1, generator=generator)


def axis_checks(
    model: Model, parallelism: Parallelism, world_size: int, *, seq_len: int
) -> dict[str, Callable[[], None]]:
    """Return the checks of a model for further axes of the mesh, by option. They raise UserError."""
    checks: dict[str, Callable[[], None]] = {}
    if parallelism.context_parallel_degree > 1:
        checks["parallelism.context_parallel_degree"] = partial(check_context, model)
    if (degree := parallelism.expert_parallel_degree) > 1:
        checks["parallelism.expert_parallel_degree"] = lambda: check_experts(
            model, degree, parallelism.degrees(world_size).sharded, split_layers=parallelism.tensor_parallel_degree > 1
        )
    if (ranks := parallelism.tensor_parallel_degree) > 1:
        of_a_rank = seq_len // parallelism.context_parallel_degree
        checks["parallelism.tensor_parallel_degree"] = partial(check_tensor, model, ranks, seq_len=of_a_rank)
    return checks


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


def check_context(model: Model) -> None:
    """Check that several processes can split the sequences of a model.

    Raises:
        UserError: they cannot.
    """
    name = type(model).__name__
    if not _takes_documents(model):
        raise UserError(
            f"needs a model whose forward takes `documents`, and {name}.forward does not: add the argument and take "
            "positions and the mask from it (docs/add_a_model.md), or set 1"
        )
    for number, block in enumerate(model.layers):
        if not any(hasattr(module, "key_source") for module in block.modules()):
            raise UserError(
                f"block {number} of {name} has no `key_source`, through which attention gets the keys of other "
                "processes: use titanlite.models.layers.Attention or see docs/add_a_model.md, or set 1"
            )


def check_experts(model: Model, degree: int, sharded: int, *, split_layers: bool = False) -> None:
    """Check that several processes can have different experts of a model.

    Args:
        degree: divides `sharded`.
        sharded: processes that a replica's parameters are sharded over.
        split_layers: whether other processes split the hidden dims of experts.

    Raises:
        UserError: they cannot.
    """
    layers = expert_layers(model)
    if not layers:
        raise UserError(f"needs a model with experts, and {type(model).__name__} has none: set 1")
    shapes = {
        (getattr(layer, name).shape, *(layer.hidden_dims[index : index + 1] if split_layers else ()))
        for layer in layers
        for index, name in enumerate(layer.stacks)
    }
    for shape, *taken in sorted(shapes):
        if shape[0] % degree:
            raise UserError(f"{degree} does not divide the {shape[0]} experts of a layer: set a divisor of {shape[0]}")
        free = [size for dim, size in enumerate(shape) if dim and dim not in taken]
        if all(size % (sharded // degree) for size in free):
            raise UserError(
                f"{degree} leaves {sharded // degree} processes to share each expert, and no dim of {free} is "
                "a multiple of that: set a higher degree"
            )


def _takes_documents(model: Model) -> bool:
    parameters = signature(model.forward).parameters.values()
    return any(it.name == "documents" or it.kind is it.VAR_KEYWORD for it in parameters)
