"""Build the models of a run: the one that is trained, with its optimizer and its loss, and its teacher."""

import logging
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from titanlite.checkpoint.load import read_model
from titanlite.checks.preflight import ResolvedConfig
from titanlite.config.schema import ActivationCheckpoint, Compile, Config, Float8, Freeze, Parallelism, Training
from titanlite.config.schema import Teacher as TeacherConfig
from titanlite.data.samples import Samples
from titanlite.loss import LossFunction, build_loss
from titanlite.mesh import world_group
from titanlite.metrics.memory_watch import MemoryWatch
from titanlite.metrics.phase_memory import PhaseMemory
from titanlite.metrics.source_losses import LossBySource
from titanlite.models.base import Model, unique_parameters
from titanlite.observer import Phase
from titanlite.ops import pick_kernels
from titanlite.ops.kernels import Kernels
from titanlite.optim import build_optimizer
from titanlite.parallelize import DTYPES, materialize, parallelize
from titanlite.parallelize.materialize import allocate
from titanlite.run.run_folder import RunFolder
from titanlite.runtime.ranks import check_same_everywhere
from titanlite.storage.disk import DiskTensors, open_disk
from titanlite.techniques.distill.source import TeacherSource, fingerprint, forward_flops, teacher_model
from titanlite.techniques.distill.teacher import Teacher
from titanlite.techniques.tensor import split_vocabulary

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class State:
    """The tensors of a run, and what computes with them."""

    kernels: Kernels
    model: Model
    optimizer: torch.optim.Optimizer
    disk: DiskTensors | None
    """Disk that holds some of the tensors. None: all are in memory."""
    memory: PhaseMemory
    """Memory of each phase so far. The present one is the load of a checkpoint."""


def build_state(
    config: Config, resolved: ResolvedConfig, *, mesh: DeviceMesh, device: torch.device, folder: RunFolder
) -> State:
    """Build the model on the meta device, parallelize it, give it memory and values; then build its optimizer."""
    memory = PhaseMemory(MemoryWatch(device), is_on=mesh.get_rank() == 0)
    memory.phase(Phase.MODEL)
    kernels = pick_kernels(device, compiles=config.compile.enable, attention_backend=config.training.attention_backend)
    kernels = split_vocabulary(kernels, mesh)
    disk = open_disk(config.offload, folder.path)
    model = resolved.model.build()
    memory.phase(Phase.SHARDING)
    parallelize_student(model, config, mesh=mesh, kernels=kernels, pin_memory=not (disk and disk.holds_parameters))
    materialize(
        model,
        device=device,
        offload=config.training.enable_cpu_offload,
        dtype=DTYPES[config.training.dtype],
        seed=config.debug.seed,
        disk=disk if disk and disk.holds_parameters else None,
    )
    memory.label((parameter for _, parameter in unique_parameters(model)), "parameters")
    memory.phase(Phase.OPTIMIZER)
    optimizer = build_optimizer(model, config.optimizer, seed=config.debug.seed, disk=disk)
    memory.follow(optimizer)
    memory.phase(Phase.CHECKPOINT_LOAD)
    return State(kernels=kernels, model=model, optimizer=optimizer, disk=disk, memory=memory)


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
        freeze=config.freeze,
        lora=config.lora,
        has_other_model=config.teacher.is_live,
        updates_in_backward=config.optimizer.in_backward,
        **options,
    )


def build_frozen_teacher(
    config: Config, resolved: ResolvedConfig, *, kernels: Kernels, mesh: DeviceMesh, device: torch.device
) -> Teacher | None:
    """Build the teacher that `[teacher]` names, if any, with its weights."""
    if resolved.teacher is None:
        return None
    return build_teacher(
        config.teacher,
        resolved.teacher,
        mesh=mesh,
        device=device,
        kernels=kernels,
        parallelism=config.parallelism,
        training=config.training,
        compile=config.compile,
    )


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
        float8=Float8(),
        freeze=Freeze(),
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


def build_loss_function(config: Config, kernels: Kernels, samples: Samples) -> LossFunction:
    """Return the loss function of the config, which also sums by source if the config asks for that."""
    loss = build_loss(config.training, kernels, config.distill if config.teacher.is_set else None)
    return LossBySource(loss, [source.name for source in samples.sources]) if config.metrics.loss_by_source else loss
