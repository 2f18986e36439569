"""FSDP2 / HSDP: every block, the embedding and the head are FSDP units of their own (arXiv:2304.11277)."""

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
from titanlite.kernels import Kernels
from titanlite.models.base import Model, head_of, unique_parameters
from titanlite.models.quantized import quantized_parameters
from titanlite.parallelize.mesh import has_replicas, shard_degree_of, sharding_mesh
from titanlite.runtime.dtensor import chunk_sizes
from titanlite.runtime.private_torch.fsdp import free_gather_buffer, gather_in_place, keep_dtypes, wait_for_reduction

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
GPUS_OF_A_NODE = 8
"""Largest shard group that is taken to be connected by NVLink."""
MANY_TOKENS = 2**14
"""Tokens of a micro-batch from which on blocks need more memory in backward than the loss."""


def shard(
    model: Model,
    *,
    mesh: DeviceMesh,
    kernels: Kernels,
    parallelism: Parallelism,
    training: Training,
    pin_memory: bool = True,
) -> None:
    """Apply `fully_shard` to every FSDP unit and to the root, in place. FSDP averages gradients over the mesh.

    Args:
        pin_memory: with CPU offload to a GPU: FSDP copies parameters to pinned memory.
    """
    on_gpu = mesh.device_type == "cuda"
    compute_dtype = DTYPES[training.mixed_precision_param]
    quantized = quantized_parameters(model)
    has_compute_dtype = all(it.dtype == compute_dtype for it in model.parameters() if it not in quantized)
    options: dict[str, Any] = {
        "mesh": sharding_mesh(mesh),
        "mp_policy": MixedPrecisionPolicy(
            # None: weights that have the compute dtype already are not copied.
            param_dtype=None if has_compute_dtype else compute_dtype,
            reduce_dtype=DTYPES[training.mixed_precision_reduce],
            cast_forward_inputs=False,
        ),
        "offload_policy": CPUOffloadPolicy(on_gpu and pin_memory) if training.enable_cpu_offload else OffloadPolicy(),
    }
    shard_degree = shard_degree_of(mesh)
    reshard = _reshard_after_forward(parallelism, shard_degree=shard_degree)
    units = fsdp_units(model)
    head = head_of(model)
    for unit in units:
        keeps = head in unit and parallelism.fsdp_reshard_after_forward == "default"
        together = unit if len(unit) > 1 else unit[0]
        fully_shard(together, reshard_after_forward=False if keeps else reshard, **options)
    fully_shard(model, reshard_after_forward=reshard, **options)
    sharded: list[FSDPModule] = [it for it in (*(unit[0] for unit in units), model) if isinstance(it, FSDPModule)]
    reduces_in_backward = has_replicas(mesh) or training.dtype != training.mixed_precision_reduce
    kernels.adapt_fsdp(
        sharded, shard_degree=shard_degree, reduces_in_backward=reduces_in_backward,
        adds_gradients=_adds_gradients(mesh, parallelism, training),
    )  # fmt: skip
    if [head] in units and kernels.is_gpu(torch.device(mesh.device_type)) and _can_wait(mesh, training):
        assert isinstance(head, FSDPModule)
        wait_for_reduction(head)
    _prefetch(sharded[:-1], parallelism)
    head.register_forward_pre_hook(_free_gather_buffer)  # no all-gather follows, and the loss needs the memory
    quantized = quantized_parameters(model)  # they are others now
    for unit in sharded:
        if isinstance(unit, nn.Embedding) and [unit] in units:
            unit.set_unshard_in_backward(False)  # the gradient of a lookup does not need the table
        if shard_degree == 1 and has_compute_dtype and not training.enable_cpu_offload:
            gather_in_place(unit)
        elif quantized and not has_compute_dtype:
            keep_dtypes(unit, quantized)


def _can_wait(mesh: DeviceMesh, training: Training) -> bool:
    """Return True if backward can wait for the reduce-scatter of the head.

    FSDP would keep its input beside the backward pass of the last block, which is the peak of memory: 2 GiB of Llama 3
    8B. It takes some 5 ms on the links within a node, which is little beside a step of many tokens.
    """
    sequences = training.local_batch_size or training.global_batch_size // mesh.size()
    return shard_degree_of(mesh) <= GPUS_OF_A_NODE and sequences * training.seq_len >= MANY_TOKENS


def _adds_gradients(mesh: DeviceMesh, parallelism: Parallelism, training: Training) -> bool:
    """Return True if reduced gradients of one micro-batch are kept for the next one to add to. With replicas, FSDP adds
    them up before they become gradients."""
    accumulates = training.global_batch_size > mesh.size() * (training.local_batch_size or training.global_batch_size)
    return accumulates and parallelism.fsdp_reduce_gradients == "each" and not has_replicas(mesh)


def _free_gather_buffer(module: nn.Module, _: Any) -> None:
    if isinstance(module, FSDPModule):
        free_gather_buffer(module)


def fsdp_units(model: Model) -> list[list[nn.Module]]:
    """Modules whose parameters are gathered and freed together, in the order of the forward pass.

    Each block of `layers` is a unit, and each other direct child with parameters. Children that share a parameter, as
    a tied head does, are one unit.
    """
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


def largest_shard(model: Model, shard_degree: int) -> int:
    """Return the number of elements that the first rank will have of a model that is not sharded yet.

    FSDP shards dim 0 of each parameter, and the first rank has the most: of 128 experts on 256 ranks, one.
    """
    shapes = [parameter.shape for _, parameter in unique_parameters(model)]
    return sum(chunk_sizes(shape[0], shard_degree)[0] * shape[1:].numel() for shape in shapes)


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
