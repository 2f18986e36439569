"""Parameters on disk: their memory is mapped files, and is dropped after use."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from titanlite.models.base import Model, trainable_parameters, unique_parameters
from titanlite.runtime.dtensor import from_local_like
from titanlite.runtime.private_torch.tensors import local_tensor
from titanlite.storage.disk import DiskTensors


def tensors_on_disk(model: Model, disk: DiskTensors) -> dict[Tensor, Tensor]:
    """Return the tensor on disk for each parameter. Where rows do not divide evenly, FSDP copies the last rank's part
    to pad it, and that copy is in memory."""
    parameters = [parameter for _, parameter in unique_parameters(model)]
    parts = disk.allocate([(local_tensor(parameter).shape, parameter.dtype) for parameter in parameters])
    return {p: from_local_like(part, p) for p, part in zip(parameters, parts, strict=True)}


def drop_after_use(model: Model, disk: DiskTensors) -> None:
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
    for parameter in trainable_parameters(model).values():
        parameter.register_post_accumulate_grad_hook(lambda parameter: disk.drop(local_tensor(parameter)))
