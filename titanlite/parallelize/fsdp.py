"""FSDP2 / HSDP: shard every block, and the embedding and the head, as units of their own (arXiv:2304.11277)."""

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from titanlite.config.schema import Parallelism, Training
from titanlite.cpu.collectives import suit_gloo
from titanlite.models.base import Model
from titanlite.parallelize.mesh import sharding_mesh

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def shard(
    model: Model, *, mesh: DeviceMesh, parallelism: Parallelism, training: Training, pin_memory: bool = True
) -> None:
    """Apply `fully_shard` to every unit and to the root, in place. Gradients are averaged over all processes.

    Args:
        pin_memory: with CPU offload to a GPU: FSDP copies parameters to memory that is pinned.
    """
    on_gpu = mesh.device_type == "cuda"
    has_right_type = training.dtype == training.mixed_precision_param
    options: dict[str, Any] = {
        "mesh": sharding_mesh(mesh),
        "mp_policy": MixedPrecisionPolicy(
            # Weights that are of it already are not to be copied on their way.
            param_dtype=None if has_right_type else DTYPES[training.mixed_precision_param],
            reduce_dtype=DTYPES[training.mixed_precision_reduce],
            cast_forward_inputs=False,
        ),
        "offload_policy": CPUOffloadPolicy(on_gpu and pin_memory) if training.enable_cpu_offload else OffloadPolicy(),
    }
    reshard = _reshard_after_forward(parallelism, shard_degree=mesh["shard"].size())
    units = sharding_units(model)
    head = list(model.children())[-1]
    for unit in units:
        keeps = head in unit and parallelism.fsdp_reshard_after_forward == "default"
        together = unit if len(unit) > 1 else unit[0]
        fully_shard(together, reshard_after_forward=False if keeps else reshard, **options)
    fully_shard(model, reshard_after_forward=reshard, **options)
    fsdp_units: list[FSDPModule] = [it for it in (*(unit[0] for unit in units), model) if isinstance(it, FSDPModule)]
    if not on_gpu:
        reduces_at_once = mesh["replicate"].size() > 1 or training.dtype != training.mixed_precision_reduce
        suit_gloo(fsdp_units, shard_degree=mesh["shard"].size(), reduces_at_once=reduces_at_once)
    _prefetch(fsdp_units[:-1], parallelism)
    for unit in fsdp_units:
        if isinstance(unit, nn.Embedding) and [unit] in units:
            unit.set_unshard_in_backward(False)  # the gradient of a lookup does not need the table
        if mesh["shard"].size() == 1 and has_right_type and not training.enable_cpu_offload:
            _gather_in_place(unit)


def _gather_in_place(module: FSDPModule) -> None:
    """At shard degree 1, weights that are of the type of compute already are what a gathering of them would give. So
    FSDP is told that its gathered parameters lie where the sharded ones do: nothing is copied, and nothing freed."""
    unit = module._get_fsdp_state()._fsdp_param_group
    parameters: Any = unit.fsdp_params if unit else []
    for parameter in parameters:
        parameter.init_all_gather_outputs = partial(_use_sharded, parameter)
        parameter.free_unsharded_param = lambda: None


def _use_sharded(parameter: Any, *_: Any) -> None:
    """In place of `FSDPParam.init_all_gather_outputs`, which FSDP calls before it copies into these outputs."""
    memory = parameter._sharded_param_data
    if not parameter.all_gather_outputs or parameter.all_gather_outputs[0] is not memory:
        parameter.all_gather_outputs = [memory]
        if hasattr(parameter, "_unsharded_param"):
            del parameter._unsharded_param  # it lies where the weights were before


def sharding_units(model: Model) -> list[list[nn.Module]]:
    """What is gathered and freed together, in the order of the forward pass: each block of `layers`, and each other
    direct child with parameters. Children that share a parameter (a tied head) are one unit."""
    units: list[list[nn.Module]] = []
    unit_of: dict[nn.Parameter, list[nn.Module]] = {}
    for child in model.children():
        if child is model.layers:
            units.extend([block] for block in model.layers)
            continue
        parameters = list(child.parameters())
        unit = next((unit_of[parameter] for parameter in parameters if parameter in unit_of), None)
        if unit is not None:
            unit.append(child)
        elif parameters:
            units.append(unit := [child])
        unit_of.update(dict.fromkeys(parameters, unit or []))
    return units


def _reshard_after_forward(parallelism: Parallelism, *, shard_degree: int) -> bool | int:
    policy = parallelism.fsdp_reshard_after_forward
    if isinstance(policy, int):
        return policy if policy > 1 else False  # a 1/1 shard is the whole parameter
    return policy != "never" and (shard_degree > 1 or policy == "always")


def _prefetch(units: list[FSDPModule], parallelism: Parallelism) -> None:
    forward, backward = parallelism.fsdp_forward_prefetch, parallelism.fsdp_backward_prefetch
    for index, unit in enumerate(units):
        if forward:
            unit.set_modules_to_forward_prefetch(units[index + 1 : index + 1 + forward])
        if backward:
            unit.set_modules_to_backward_prefetch(units[max(0, index - backward) : index][::-1])
