"""The ordered list of techniques that turn a single-device model on the meta device into the one that ranks train.

The order matters. First the dtype of the weights, and which of them are frozen, or get an adapter. Then float8. Both
swap linear layers: all later techniques must see the new ones. Then layers are split over ranks, and blocks that other
ranks have are left out. Checkpointing of activations before compile, so that the compiler sees what is recomputed.
Compile before sharding, so that FSDP's hooks stay outside of compiled code. Sharding last, bottom up. All change the
model in place, and no parameter's name.

Each technique of `titanlite.techniques` is imported where the config asks for it, so that a plain run reads as short as
it is.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from titanlite.mesh import build_mesh, context_group, expert_meshes, pipeline_mesh, shard_degree_of, tensor_mesh
from titanlite.models.base import Model
from titanlite.ops.kernels import Kernels, set_kernels
from titanlite.parallelize.activation_checkpoint import (
    RecomputePolicy,
    apply_activation_checkpoint,
    recompute_policies,
)
from titanlite.parallelize.compile import compile_around_exchange, compile_blocks
from titanlite.parallelize.fsdp import DTYPES, reduces_once, shard
from titanlite.parallelize.materialize import materialize, set_dtype
from titanlite.schema import ActivationCheckpoint, Compile, Config, Float8, Parallelism, Training
from titanlite.techniques import choose_trained, keeps_gradients, places

NO_FLOAT8 = Float8()

__all__ = ["DTYPES", "build_mesh", "materialize", "parallelize", "parallelize_student", "reduces_gradients_once"]


def parallelize_student(model: Model, config: Config, *, mesh: DeviceMesh, kernels: Kernels, **options: Any) -> None:
    """Apply every technique of the config to the model that is trained, in place.

    Args:
        options: further ones of `parallelize`.
    """
    parallelize(
        model,
        mesh=mesh,
        kernels=kernels,
        parallelism=config.parallelism,
        training=config.training,
        activation_checkpoint=config.activation_checkpoint,
        compile=config.compile,
        float8=config.quantize.linear.float8,
        choose_trained=partial(choose_trained, config=config),
        lasting_gradients=keeps_gradients(config),
        on_host="parameters" in places(config),
        reproducible_layouts=config.debug.reproducible_layouts,
        reproducible_parts=config.debug.reproducible_context_degree,
        **options,
    )


def reduces_gradients_once(config: Config, mesh: DeviceMesh) -> bool:
    """Return the `reduce_once` of a step with the model of `parallelize_student`."""
    return reduces_once(
        mesh,
        config.parallelism,
        config.training,
        adds_gradients=not config.debug.reproducible_layouts,
        on_host="parameters" in places(config),
    )


def parallelize(
    model: Model,
    *,
    mesh: DeviceMesh,
    kernels: Kernels,
    parallelism: Parallelism,
    training: Training,
    activation_checkpoint: ActivationCheckpoint,
    compile: Compile,
    float8: Float8 = NO_FLOAT8,
    choose_trained: Callable[[Model], None] = lambda model: None,
    compile_backend: str = "inductor",
    has_other_sizes: bool = False,
    lasting_gradients: bool = True,
    reproducible_layouts: bool = False,
    reproducible_parts: int = 1,
    on_host: bool | None = None,
    pin_memory: bool = True,
) -> None:
    """Apply every technique that the config asks for, in place. `materialize` then gives the model its memory.

    Args:
        kernels: how the device computes; see `titanlite.ops.kernels`.
        choose_trained: freezes parameters, and adds those of adapters; see `titanlite.techniques`. Default: all are
            trained.
        compile_backend: of torch.compile; the planner has its own.
        has_other_sizes: whether a frozen model runs beside it, or this is one; see `compile_blocks`.
        lasting_gradients: whether gradients last until after backward. Otherwise hooks of the parameters use them.
        reproducible_layouts: whether gradients have the same bits on every layout.
        reproducible_parts: `debug.reproducible_context_degree`.
        on_host: whether parameters are in host memory. Default: `training.enable_cpu_offload`.
        pin_memory: whether they are pinned there, with a GPU.
    """
    on_host = training.enable_cpu_offload if on_host is None else on_host
    set_dtype(model, DTYPES[training.dtype])
    choose_trained(model)
    set_kernels(model, kernels)
    if context_group(mesh) and reproducible_parts == 1:
        from titanlite.techniques.context.sequences import split_attention

        split_attention(model, mesh)
    if float8.enable:
        from titanlite.techniques.float8.layers import convert_to_float8

        convert_to_float8(
            model, float8=float8, shard_degree=shard_degree_of(mesh), tensor=tensor_mesh(mesh), on_host=on_host
        )
    if tensor_mesh(mesh):
        from titanlite.techniques.tensor.layers import split_layers

        split_layers(model, mesh)
    separate = None
    if (degree := parallelism.expert_parallel_degree) > 1:
        from titanlite.techniques.expert.exchange import distribute_experts

        exchange = None
        if reproducible_layouts:
            from titanlite.techniques.reproducible.experts import ExchangeOfMicroBatches

            exchange = partial(ExchangeOfMicroBatches, dtype=DTYPES[training.mixed_precision_reduce])
        sharding, parts = expert_meshes(mesh, degree, with_replicas=not reproducible_layouts)
        separate = distribute_experts(
            model, mesh=sharding, parts=parts, kernels=kernels, is_compiled=compile.enable, exchange=exchange
        )
    if reproducible_parts > 1:
        from titanlite.techniques.reproducible.parts import compute_by_parts

        compute_by_parts(model, mesh, parts=reproducible_parts, dtype=DTYPES[training.mixed_precision_reduce])
    policies = recompute_policies(activation_checkpoint, len(model.layers))
    if pipeline_mesh(mesh):
        from titanlite.techniques.pipeline.stages import cut_to_stages

        cut_to_stages(model, mesh, parallelism)
    kept: list[RecomputePolicy] = [policies[int(layer)] for layer, _ in model.layers.named_children()]
    if compile.enable:
        compile_around_exchange(model, backend=compile_backend, has_other_sizes=has_other_sizes)
    apply_activation_checkpoint(model, kept, is_compiled=compile.enable)
    if compile.enable:
        compile_blocks(model, backend=compile_backend, has_other_sizes=has_other_sizes)
    reduce = None
    if reproducible_layouts:
        from titanlite.techniques.reproducible.sums import tree_reduce_scatter as reduce
    shard(
        model, mesh=mesh, kernels=kernels, parallelism=parallelism, training=training, separate=separate,
        lasting_gradients=lasting_gradients, reduce=reduce, on_host=on_host, pin_memory=pin_memory,
    )  # fmt: skip
    if tensor_mesh(mesh):
        from titanlite.techniques.tensor.layers import use_local_parts

        use_local_parts(model, mesh)
