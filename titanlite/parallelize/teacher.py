"""Build the teacher of distillation: the same mesh and the same techniques as the student, frozen, with its weights."""

import logging
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from titanlite.checkpoint.load import read_model
from titanlite.mesh import world_group
from titanlite.models.base import Model, unique_parameters
from titanlite.ops.kernels import Kernels
from titanlite.parallelize import parallelize
from titanlite.parallelize.materialize import allocate
from titanlite.runtime.ranks import check_same_everywhere
from titanlite.schema import ActivationCheckpoint, Compile, Parallelism, Training
from titanlite.schema import Teacher as TeacherConfig
from titanlite.techniques.distill.source import TeacherSource, fingerprint, forward_flops, teacher_model
from titanlite.techniques.distill.teacher import Teacher

logger = logging.getLogger(__name__)


def teacher_training(config: TeacherConfig, training: Training) -> Training:
    """Return `[training]` with the dtype and the place of the teacher's parameters."""
    dtype = config.dtype or training.mixed_precision_param
    offload = config.enable_cpu_offload
    return training.model_copy(update={"dtype": dtype, "mixed_precision_param": dtype, "enable_cpu_offload": offload})


def parallelize_teacher(
    model: Model,
    config: TeacherConfig,
    *,
    mesh: DeviceMesh,
    kernels: Kernels,
    parallelism: Parallelism,
    training: Training,
    compile: Compile,
    **options: Any,
) -> None:
    """Apply what the student's config asks for and the teacher needs, in place: compile and FSDP.

    Args:
        options: further ones of `parallelize`.
    """
    reshard = config.fsdp_reshard_after_forward
    parallelize(
        model,
        mesh=mesh,
        kernels=kernels,
        parallelism=parallelism.model_copy(update={"fsdp_reshard_after_forward": reshard, "expert_parallel_degree": 1}),
        training=teacher_training(config, training),
        activation_checkpoint=ActivationCheckpoint(),
        compile=compile,
        has_other_model=True,
        **options,
    )


def build_teacher(
    config: TeacherConfig,
    source: TeacherSource,
    *,
    mesh: DeviceMesh,
    device: torch.device,
    kernels: Kernels,
    parallelism: Parallelism,
    training: Training,
    compile: Compile,
) -> Teacher:
    """Build the teacher on every rank, and read each rank's part of its weights.

    Raises:
        UserError: the weights are of another model or damaged, or not the same on all ranks.
    """
    check_same_everywhere(fingerprint(source), "teacher.path: the teacher", group=world_group(mesh))
    model = teacher_model(source.spec, seq_len=training.seq_len)
    full, causal = (forward_flops(source.spec, training.seq_len, causal=causal) for causal in (False, True))
    count = sum(parameter.numel() for _, parameter in unique_parameters(model))
    parallelize_teacher(
        model, config, mesh=mesh, kernels=kernels, parallelism=parallelism, training=training, compile=compile
    )
    allocate(model, torch.device("cpu") if config.enable_cpu_offload else device, device)
    group = dist.new_group(backend="gloo", group_desc="teacher")
    assert isinstance(group, dist.ProcessGroup)
    read_model(model, source.reader, where=source.where, key="teacher.path", group=group)
    dist.destroy_process_group(group)
    dtype = teacher_training(config, training).dtype
    logger.info(f"teacher from {source.where}: {count:,} parameters in {dtype}, frozen")
    keeps_gathered = config.fsdp_reshard_after_forward == "never"
    return Teacher(model.eval(), keeps_gathered=keeps_gathered, flops_per_token=(full, causal))
