"""The ordered list of techniques that turn a single-device model on the meta device into the one that ranks train.

The order matters, and comments say why each stands where it does. All change the model in place, and no parameter's
name.

Each technique of `titanlite.techniques` is imported where the config asks for it, so that a plain run reads as short as
it is.
"""

from functools import partial

import torch
from torch.distributed.device_mesh import DeviceMesh

from titanlite.mesh import build_mesh, context_group, expert_meshes, pipeline_mesh, shard_degree_of, tensor_mesh
from titanlite.models.base import Model
from titanlite.models.pytorch_layers import use_kernels
from titanlite.ops.kernels import Kernels
from titanlite.parallelize.activation_checkpoint import (
    RecomputePolicy,
    apply_activation_checkpoint,
    recompute_policies,
)
from titanlite.parallelize.compile import compile_around_exchange, compile_blocks
from titanlite.parallelize.fsdp import DTYPES, adds_over_replicas, shard
from titanlite.parallelize.materialize import materialize, set_dtype
from titanlite.schema import Config
from titanlite.techniques import choose_trained

__all__ = ["DTYPES", "build_mesh", "materialize", "parallelize"]


def parallelize(
    model: Model, config: Config, *, mesh: DeviceMesh, kernels: Kernels, compile_backend: str = "inductor"
) -> None:
    """Apply every technique that the config asks for, in place. `materialize` then gives the model its memory.

    Args:
        kernels: how the device computes; see `titanlite.ops.kernels`.
        compile_backend: of torch.compile; the planner has its own.
    """
    training, parallelism, debug = config.training, config.parallelism, config.debug
    float8, recomputed = config.quantize.linear.float8, config.activation_checkpoint
    is_compiled = config.compile.enable
    # Blocks meet other shapes if a frozen model runs beside this one, or sequences get longer.
    has_other_sizes = config.teacher.path is not None or (bool(training.seq_len_ramp) and not config.data.document_mask)

    # What is trained, and in which dtype. Adapters are linear layers, which all that follows must see.
    set_dtype(model, DTYPES[training.dtype])
    choose_trained(model, config)
    use_kernels(model, kernels, torch.device(mesh.device_type))
    # Attention to keys of other ranks, or for heads of theirs. It replaces no layer.
    if context_group(mesh) and debug.reproducible_context_degree == 1:
        from titanlite.techniques.context.sequences import split_attention

        split_attention(model, mesh, exchanges_heads=parallelism.context_parallel_method == "ulysses")
    # Float8 replaces linear layers before they are split.
    if float8.enable:
        from titanlite.techniques.float8.layers import convert_to_float8

        convert_to_float8(
            model, float8=float8, shard_degree=shard_degree_of(mesh), tensor=tensor_mesh(mesh),
            on_host=training.enable_cpu_offload,
        )  # fmt: skip
    # Layers, experts and sequences of this rank.
    if tensor_mesh(mesh):
        from titanlite.techniques.tensor.layers import split_layers

        split_layers(model, mesh)
    expert_units = None
    if (degree := parallelism.expert_parallel_degree) > 1:
        from titanlite.techniques.expert.exchange import distribute_experts

        exchange = None
        if debug.reproducible_layouts:
            from titanlite.techniques.reproducible.experts import ExchangeOfMicroBatches

            exchange = partial(ExchangeOfMicroBatches, dtype=DTYPES[training.mixed_precision_reduce])
        sharding, experts = expert_meshes(mesh, degree, with_replicas=adds_over_replicas(config))
        expert_units = distribute_experts(
            model, mesh=sharding, parts=experts, kernels=kernels, is_compiled=is_compiled, exchange=exchange
        )
    if (parts := debug.reproducible_context_degree) > 1:
        from titanlite.techniques.reproducible.parts import compute_by_parts

        compute_by_parts(model, mesh, parts=parts, dtype=DTYPES[training.mixed_precision_reduce])
    # Blocks of this rank's stages. The policies are of all blocks, so they are chosen before.
    policies = recompute_policies(recomputed, len(model.layers))
    if pipeline_mesh(mesh):
        from titanlite.techniques.pipeline.stages import cut_to_stages

        cut_to_stages(model, mesh, parallelism)
    own: list[RecomputePolicy] = [policies[int(layer)] for layer, _ in model.layers.named_children()]
    # Recomputation within compiled blocks, so that the compiler sees what is recomputed. A block that exchanges tokens
    # is compiled in parts around the exchange, and recomputation surrounds these.
    if is_compiled:
        compile_around_exchange(model, backend=compile_backend, has_other_sizes=has_other_sizes)
    apply_activation_checkpoint(model, own, is_compiled=is_compiled)
    if is_compiled:
        compile_blocks(model, backend=compile_backend, has_other_sizes=has_other_sizes)
    # FSDP last, so that its hooks stay outside of compiled code.
    reduce_scatter = None
    if debug.reproducible_layouts:
        from titanlite.techniques.reproducible.sums import tree_reduce_scatter as reduce_scatter
    shard(model, config, mesh=mesh, kernels=kernels, expert_units=expert_units, reduce_scatter=reduce_scatter)
    if recomputed.offload:  # hooks that run within FSDP's, whose parameters are gathered then
        from titanlite.techniques.activations.host import LEAST_BYTES, HostActivations

        is_gpu = kernels.is_gpu(torch.device(mesh.device_type))
        model.kept_on_host = HostActivations(model, least_bytes=LEAST_BYTES if is_gpu else 1)
    if tensor_mesh(mesh):  # hooks that run within FSDP's
        from titanlite.techniques.tensor.layers import use_local_parts

        use_local_parts(model, mesh)
