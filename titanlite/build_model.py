"""Build the models of a run: the one that is trained, with its optimizer and its loss, and its teacher."""

from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from titanlite.config.schema import Config
from titanlite.data.samples import Samples
from titanlite.kernels import Kernels
from titanlite.loss import LossFunction, build_loss
from titanlite.metrics.memory_watch import MemoryWatch
from titanlite.metrics.phase_memory import PhaseMemory
from titanlite.metrics.source_losses import LossBySource
from titanlite.models.base import Model, unique_parameters
from titanlite.optim import build_optimizer
from titanlite.parallelize import DTYPES, materialize, parallelize
from titanlite.parallelize.tensor import split_vocabulary
from titanlite.preflight import ResolvedConfig
from titanlite.runtime.disk import DiskTensors, open_disk
from titanlite.runtime.process_group import pick_kernels
from titanlite.runtime.run_folder import RunFolder
from titanlite.teacher import Teacher, build_teacher


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
    memory.phase("model")
    kernels = pick_kernels(device, compiles=config.compile.enable, attention_backend=config.training.attention_backend)
    kernels = split_vocabulary(kernels, mesh)
    disk = open_disk(config.offload, folder.path)
    model = resolved.model.build()
    memory.phase("sharding")
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
    memory.phase("optimizer")
    optimizer = build_optimizer(model, config.optimizer, seed=config.debug.seed, disk=disk)
    memory.follow(optimizer)
    memory.phase("checkpoint load")
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


def build_loss_function(config: Config, kernels: Kernels, samples: Samples) -> LossFunction:
    """Return the loss function of the config, which also sums by source if the config asks for that."""
    loss = build_loss(config.training, kernels, config.distill if config.teacher.is_set else None)
    return LossBySource(loss, [source.name for source in samples.sources]) if config.metrics.loss_by_source else loss
