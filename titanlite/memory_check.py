"""Memory and disk that a model needs for training, checked before anything is allocated."""

from pathlib import Path

import torch

from titanlite.config.schema import Config
from titanlite.models.base import Model, trainable_parameters, unique_parameters
from titanlite.optim.state_size import state_bytes
from titanlite.parallelize.fsdp import largest_shard
from titanlite.parallelize.materialize import check_memory
from titanlite.runtime.disk import check_room, folder_of
from titanlite.runtime.process_group import Ranks

SIZES = {"bfloat16": 2, "float16": 2, "float32": 4}
"""Bytes of a value."""


def check_model_memory(
    model: Model, config: Config, ranks: Ranks, device: torch.device, *, teacher: Model | None = None
) -> None:
    """Compare the least memory that a step needs with the available memory.

    Args:
        teacher: frozen model beside the one that is trained.

    Raises:
        UserError: it does not fit.
    """
    in_memory, _ = bytes_per_parameter(model, config)
    degree = config.parallelism.degrees(ranks.world_size).shard
    needed = {config.training.enable_cpu_offload: largest_shard(model, degree) * in_memory}
    if teacher is not None:
        size = SIZES[config.teacher.dtype or config.training.mixed_precision_param]
        place = config.teacher.enable_cpu_offload
        needed[place] = needed.get(place, 0) + largest_shard(teacher, degree) * size
    if device.type == "cpu":  # host memory is all there is
        needed = {False: sum(needed.values())}
    for offload, size in needed.items():
        check_memory(
            size,
            parameters=[sum(p.numel() for _, p in unique_parameters(it)) for it in (model, teacher) if it is not None],
            shard_degree=degree,
            local_world_size=ranks.local_world_size,
            device=device,
            offload=offload,
        )


def check_model_disk(model: Model, config: Config, ranks: Ranks) -> None:
    _, on_disk = bytes_per_parameter(model, config)
    of_a_rank = on_disk * largest_shard(model, config.parallelism.degrees(ranks.world_size).shard)
    folder = folder_of(config.offload, Path(config.job.dump_folder, str(config.job.name)))
    check_room(folder, of_a_rank * ranks.local_world_size)


def bytes_per_parameter(model: Model, config: Config) -> tuple[float, float]:
    """Return the bytes (in memory, on disk) of a parameter with its gradient and its optimizer states.

    With updates in backward the gradients of one FSDP unit exist at a time, which are not counted.
    """
    parameters = sum(p.numel() for p in model.parameters())
    trained = sum(p.numel() for p in trainable_parameters(model).values()) / parameters
    size = SIZES[config.training.dtype]
    weight = trained * size + (1 - trained) * SIZES[config.freeze.dtype or config.training.dtype]
    gradient = 0 if config.optimizer.in_backward else trained * size
    moments = state_bytes(config.optimizer, model, dtype=config.training.dtype) / parameters
    on_disk = weight * (config.offload.parameters == "disk") + moments * (config.offload.optimizer == "disk")
    return weight + gradient + moments - on_disk, on_disk
