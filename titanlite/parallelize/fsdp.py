"""FSDP2 / HSDP: every block, the embedding and the head are FSDP units of their own (arXiv:2304.11277).

Small blocks may be gathered together: `parallelism.fsdp_min_unit_params`.
"""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import Shard

from titanlite.mesh import shard_degree_of, sharding_mesh
from titanlite.models.base import Model, head_of
from titanlite.ops.kernels import Kernels, in_every_pass
from titanlite.parallelize.reductions import Reduce, Reductions
from titanlite.runtime.dtensor import sharded_axes
from titanlite.runtime.dtypes import torch_dtype
from titanlite.schema import Config, Parallelism, Training

if TYPE_CHECKING:
    from titanlite.techniques.expert.exchange import SeparateUnits

DTYPES = {name: torch_dtype(name) for name in ("bfloat16", "float16", "float32")}


def adds_over_replicas(config: Config) -> bool:
    """Return False if FSDP leaves replicas alone: the step adds over them, or they are workers of their own."""
    return not (config.debug.reproducible_layouts or config.outer.over_replicas)


def has_units(model: Model, config: Config, *, mesh: DeviceMesh, kernels: Kernels) -> bool:
    """Return False where FSDP would gather, convert and reduce nothing: in one process on a CPU, whose weights have the
    compute dtype. Small steps lose a third of their time to its hooks. On GPUs nothing has been measured.
    """
    training = config.training
    is_converted = _compute_dtype(model, training) is not None or training.dtype != training.mixed_precision_reduce
    is_used = training.enable_cpu_offload or config.optimizer.in_backward or config.debug.reproducible_layouts
    return mesh.size() > 1 or kernels.is_gpu(torch.device(mesh.device_type)) or is_converted or is_used


def shard(
    model: Model,
    config: Config,
    *,
    mesh: DeviceMesh,
    kernels: Kernels,
    expert_units: "SeparateUnits | None" = None,
    reduce_scatter: Reduce | None = None,
) -> None:
    """Apply `fully_shard` to every FSDP unit and to the root, in place. FSDP averages gradients over the mesh.

    It leaves the model as it is where that would change nothing: see `has_units`.

    Args:
        expert_units: those that are sharded over other ranks.
        reduce_scatter: adds gradients over shards, and the step must add them over micro-batches. Default: FSDP
            averages them over both.
    """
    if not has_units(model, config, mesh=mesh, kernels=kernels):
        return
    parallelism = config.parallelism
    units, roots = fsdp_units(model, min_params=parallelism.fsdp_min_unit_params), [*model.stages] or [model]
    shard_degree, head = shard_degree_of(mesh), head_of(model)
    precision, offload = _precision(model, config.training), _offload(config, mesh)
    apply = partial(
        fully_shard,
        mesh=sharding_mesh(mesh, with_replicas=adds_over_replicas(config)),
        mp_policy=precision,
        offload_policy=offload,
    )
    reshard = _reshard_after_forward(parallelism, shard_degree=shard_degree)
    for unit in units:
        keeps = head in unit and parallelism.fsdp_reshard_after_forward == "default"
        apply(
            unit if len(unit) > 1 else unit[0],
            reshard_after_forward=False if keeps else reshard,
            shard_placement_fn=partial(placement_of, shard_degree=shard_degree),
            ignored_params=expert_units.parameters if expert_units else None,
        )
    for root in roots:
        apply(root, reshard_after_forward=reshard)
    # Last, because FSDP leaves out modules that are units already: so the units above ignore these parameters, and the
    # root does not find them.
    others: Sequence[FSDPModule] = ()
    if expert_units:
        others = expert_units.shard(not parallelism.keeps_gathered, precision=precision, offload=offload)

    inner, root = _sharded(unit[0] for unit in units), _sharded(roots)
    reductions = Reductions.of(
        config, mesh, kernels, head=head if [head] in units else None, reduce_scatter=reduce_scatter
    )
    reductions.apply(inner, shard_degree=shard_degree)
    reductions.apply(root, shard_degree=shard_degree)  # no unit prefetches it
    if expert_units:
        reductions.apply(others, shard_degree=expert_units.mesh.size(-1))
    _prefetch(inner, parallelism)  # over the depths that `Reductions` sets
    for unit in inner:
        if isinstance(unit, nn.Embedding) and [unit] in units:
            unit.set_unshard_in_backward(False)  # the gradient of a lookup does not need the table


def _sharded(modules: Iterable[nn.Module]) -> list[FSDPModule]:
    return [module for module in modules if isinstance(module, FSDPModule)]


def _compute_dtype(model: Model, training: Training) -> torch.dtype | None:
    """Return the dtype in which weights are gathered; None if all have it, so that they are not copied."""
    compute_dtype = DTYPES[training.mixed_precision_param]
    return None if all(parameter.dtype == compute_dtype for parameter in model.parameters()) else compute_dtype


def _precision(model: Model, training: Training) -> MixedPrecisionPolicy:
    return MixedPrecisionPolicy(
        param_dtype=_compute_dtype(model, training),
        reduce_dtype=DTYPES[training.mixed_precision_reduce],
        cast_forward_inputs=False,
    )


def _offload(config: Config, mesh: DeviceMesh) -> OffloadPolicy:
    if not config.training.enable_cpu_offload:
        return OffloadPolicy()
    is_in_memory = config.offload.parameters == "memory"  # mapped files are not pinned
    return CPUOffloadPolicy(pin_memory=is_in_memory and mesh.device_type == "cuda")


def placement_of(parameter: Tensor, *, shard_degree: int) -> Shard | None:
    """Return the dimension of a parameter that FSDP shards; None for the first.

    A weight whose rows another axis splits is sharded by columns. Two axes on one dimension would give each rank rows
    of several places. FSDP shards columns evenly only.
    """
    has_split_rows = 0 in sharded_axes(parameter).values()
    by_columns = has_split_rows and parameter.ndim > 1 and parameter.shape[1] % shard_degree == 0
    return Shard(1) if by_columns else None


def fsdp_units(model: Model, *, min_params: int = 0) -> list[list[nn.Module]]:
    """Modules whose parameters are gathered and freed together, in the order of the forward pass.

    Each block of `layers` is a unit, and each other direct child with parameters. Children that share a parameter, as
    a tied head does, are one unit.

    Args:
        min_params: parameters of a unit of blocks. Neighbouring blocks become one unit until it has as many; the last
            unit may have fewer.
    """
    units: list[list[nn.Module]] = []
    unit_of: dict[nn.Parameter, list[nn.Module]] = {}
    for child in model.children():
        if child is model.layers:
            size = min_params  # so that the first block begins a unit
            for block in model.layers:
                if size >= min_params or not in_every_pass(block):
                    units.append([])
                    size = 0
                units[-1].append(block)
                size += sum(parameter.numel() for parameter in block.parameters())
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
    return not parallelism.keeps_gathered and (shard_degree > 1 or policy == "always")


def _prefetch(units: list[FSDPModule], parallelism: Parallelism) -> None:
    forward, backward = parallelism.fsdp_forward_prefetch, parallelism.fsdp_backward_prefetch
    for index, unit in enumerate(units):
        if forward:
            following = [unit for unit in units[index + 1 :] if in_every_pass(unit)]
            unit.set_modules_to_forward_prefetch(following[:forward])
        if backward:
            unit.set_modules_to_backward_prefetch(units[max(0, index - backward) : index][::-1])
