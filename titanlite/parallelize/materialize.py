"""Materialization: allocate the local shards of a meta model, and give every parameter the values it has on any
layout."""

import torch
from torch import nn

from titanlite.models.base import Model, initial_values, unique_parameters
from titanlite.models.initial import Constant, free_tables
from titanlite.ops.hash_random import random_bits, salt
from titanlite.optim.state_memory import StateMemory
from titanlite.runtime.dtensor import GlobalIndices
from titanlite.runtime.errors import UserError
from titanlite.runtime.private_torch.fsdp import gather_in_place
from titanlite.runtime.private_torch.tensors import local_tensor, replace_tensors

SLICE = 2**16
"""Values that a CPU thread draws at a time. They stay in its cache."""


def set_dtype(model: Model, dtype: torch.dtype) -> None:
    """Set the dtype of all parameters of a meta model. Buffers, such as RoPE tables, keep theirs."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)


def materialize(
    model: Model,
    *,
    device: torch.device,
    dtype: torch.dtype,
    seed: int,
    on_host: bool = False,
    memory: StateMemory | None = None,
) -> None:
    """Allocate a (sharded) meta model and fill it.

    Each rank draws its shard alone. Values depend on (seed, name, index in the whole parameter) only, so they are the
    same on every layout and device.

    Args:
        device: of compute, and of buffers.
        dtype: that all trained parameters must have.
        on_host: whether parameters live on the CPU.
        memory: of parameters. Default: as PyTorch allocates it.
    """
    parameter_device = torch.device("cpu") if on_host else device
    allocate(model, parameter_device, device, memory)
    draw_weights(model, device=device, seed=seed, memory=memory)
    if memory:
        memory.drop_after_use(model)
    _check_complete(model, parameter_device, device, dtype)


def allocate(
    model: Model, parameter_device: torch.device, device: torch.device, memory: StateMemory | None = None
) -> None:
    """Allocate parameters without values, and buffers with theirs. A shared parameter stays one."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    elsewhere = memory.zeros("parameters", names) if memory else {}
    replace_tensors(
        model,
        lambda tensor: (
            elsewhere[tensor][0] if tensor in elsewhere else torch.empty_like(tensor, device=parameter_device)
        ),
    )
    for first, *others in names.values():
        for other in others:
            module, _, attribute = other.rpartition(".")
            setattr(model.get_submodule(module), attribute, model.get_parameter(first))
    with device:
        model.init_buffers()
    gather_in_place(model)


@torch.no_grad()
def draw_weights(model: Model, *, device: torch.device, seed: int, memory: StateMemory | None = None) -> None:
    """Give every parameter its initial values, slice by slice.

    Args:
        device: computes the values. It may be another than that of the parameters.
    """
    for name, parameter in unique_parameters(model):
        values = initial_values(model, name, parameter.shape)
        flat = local_tensor(parameter).view(-1)
        indices, name_salt = GlobalIndices(parameter), salt(f"{seed}/{name}/initial")
        size = SLICE * torch.get_num_threads()
        for start in range(0, len(flat), size):
            part = flat[start : start + size]
            if isinstance(values, Constant):
                part.fill_(values.value)
            else:
                here = indices(start, len(part), device)
                part.copy_(values.values(random_bits(name_salt, here), here).float())
            if memory:
                memory.changed(part)
    free_tables()


def _check_complete(model: Model, parameter_device: torch.device, device: torch.device, dtype: torch.dtype) -> None:
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.is_meta:
            raise UserError(f"{name} has no memory: does {type(model).__name__}.init_buffers set it?")
    for name, buffer in model.named_buffers():
        if buffer.device.type != device.type:
            raise UserError(
                f"{name} is on {buffer.device}: {type(model).__name__}.init_buffers must create a new buffer"
            )
    for name, parameter in unique_parameters(model):
        assert parameter.device.type == parameter_device.type, name
        assert parameter.dtype == dtype or not parameter.requires_grad, f"{name} is {parameter.dtype}"
