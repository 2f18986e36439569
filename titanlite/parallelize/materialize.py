"""Materialization: allocate the local shards of a meta model, and give every parameter the values it has on any
layout."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from titanlite.models.base import Model, fill_weight, parameter_generator, unique_parameters
from titanlite.parallelize.fsdp import largest_shard
from titanlite.runtime.disk import DiskTensors
from titanlite.runtime.dtensor import from_local_like, slice_like
from titanlite.runtime.errors import UserError
from titanlite.runtime.hardware import host_memory
from titanlite.runtime.private_torch import local_tensor, replace_tensors


def set_dtype(model: Model, dtype: torch.dtype) -> None:
    """Set the dtype of all parameters of a meta model. Buffers, such as RoPE tables, keep theirs."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)


def materialize(
    model: Model,
    *,
    device: torch.device,
    offload: bool,
    dtype: torch.dtype,
    seed: int,
    disk: DiskTensors | None = None,
) -> None:
    """Allocate a (sharded) meta model and fill it.

    Each parameter is drawn whole from a generator seeded by (seed, name), then sliced: bit-identical on every layout.
    One whole parameter is in memory at a time. Draws differ between CPU and GPU, as their generators do.

    Args:
        device: of compute; with offload, parameters live on the CPU and buffers on the device.
        dtype: that all parameters must have.
        disk: of parameters; needs offload. None: they are in memory.
    """
    parameter_device = torch.device("cpu") if offload else device
    allocate(model, parameter_device, device, disk)
    for name, parameter in unique_parameters(model):
        _fill(model, name, parameter, device=device, seed=seed)
        if disk:
            disk.changed(local_tensor(parameter))
    if disk:
        _drop_after_use(model, disk)
    _check_complete(model, parameter_device, device, dtype)


def allocate(
    model: Model, parameter_device: torch.device, device: torch.device, disk: DiskTensors | None = None
) -> None:
    """Allocate parameters without values, and buffers with theirs. A shared parameter stays one."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    on_disk = _on_disk(model, disk) if disk else {}
    replace_tensors(
        model,
        lambda tensor: on_disk[tensor] if tensor in on_disk else torch.empty_like(tensor, device=parameter_device),
    )
    for first, *others in names.values():
        for other in others:
            module, _, attribute = other.rpartition(".")
            setattr(model.get_submodule(module), attribute, model.get_parameter(first))
    with device:
        model.init_buffers()


def _on_disk(model: Model, disk: DiskTensors) -> dict[Tensor, Tensor]:
    """Return the tensor on disk for each parameter. Where rows do not divide evenly, FSDP copies the last rank's part
    to pad it, and that copy is in memory."""
    parameters = [parameter for _, parameter in unique_parameters(model)]
    parts = disk.allocate([(local_tensor(parameter).shape, parameter.dtype) for parameter in parameters])
    return {p: from_local_like(part, p) for p, part in zip(parameters, parts, strict=True)}


def _drop_after_use(model: Model, disk: DiskTensors) -> None:
    """Drop parameters from memory after their FSDP unit's forward (compiled units excepted) and after their gradients
    are reduced."""
    units = [unit for unit in model.modules() if isinstance(unit, FSDPModule) and unit is not model]
    parts: dict[nn.Module, list[Tensor]] = {
        unit: [local_tensor(parameter) for parameter in unit.parameters()] for unit in units
    }

    def after_forward(unit: nn.Module, *_: Any) -> None:
        if not torch.compiler.is_compiling():
            disk.drop(*parts[unit])

    for unit in units:
        unit.register_forward_hook(after_forward)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda parameter: disk.drop(local_tensor(parameter)))


@torch.no_grad()
def _fill(model: Model, name: str, parameter: nn.Parameter, *, device: torch.device, seed: int) -> None:
    whole = torch.full(parameter.shape, torch.nan, device=device)  # float32; bfloat16 weights are rounded from it
    fill_weight(model, name, whole, parameter_generator(seed, name, device))
    local_tensor(parameter).copy_(slice_like(whole, parameter))


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
        assert parameter.dtype == dtype, f"{name} is {parameter.dtype}"


def check_memory(
    model: Model,
    *,
    bytes_per_parameter: float,
    shard_degree: int,
    local_world_size: int,
    device: torch.device,
    offload: bool,
) -> None:
    """Compare the least memory that a step needs with the available memory, before anything is allocated.

    Args:
        bytes_per_parameter: of the parameter, its gradient and its optimizer states, but for what is on disk.

    Raises:
        UserError: it does not fit, with both numbers.
    """
    parameters = sum(parameter.numel() for _, parameter in unique_parameters(model))
    needed = largest_shard(model, shard_degree) * bytes_per_parameter
    if device.type == "cuda" and not offload:
        available, place = torch.cuda.get_device_properties(device).total_memory, "the GPU"
    else:
        available = host_memory() / local_world_size
        place = "this machine (it has no GPU)" if device.type == "cpu" else "this machine"
        place += f", for each of {local_world_size} processes," if local_world_size > 1 else ""
    if needed > available:
        raise UserError(
            f"the model does not fit: parameters, gradients and optimizer states of its {parameters:,} parameters take "
            f"{needed / 2**30:,.1f} GiB on each process (sharded over {shard_degree}), and {place} has "
            f"{available / 2**30:,.1f} GiB. Use more processes, a higher shard degree, or a smaller flavor"
        )
