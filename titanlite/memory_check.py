"""Memory and disk that a model needs for training, checked before anything is allocated."""

from pathlib import Path

import torch

from titanlite.config.schema import Config
from titanlite.models.base import Model, trainable_parameters
from titanlite.optim.state_size import state_bytes
from titanlite.parallelize.fsdp import largest_shard
from titanlite.parallelize.materialize import check_memory
from titanlite.runtime.disk import check_room, folder_of
from titanlite.runtime.process_group import Ranks

SIZES = {"bfloat16": 2, "float16": 2, "float32": 4}
"""Bytes of a value."""


def check_model_memory(model: Model, config: Config, ranks: Ranks, device: torch.device) -> None:
    in_memory, _ = bytes_per_parameter(model, config)
    check_memory(
        model,
        bytes_per_parameter=in_memory,
        shard_degree=config.parallelism.degrees(ranks.world_size).shard,
        local_world_size=ranks.local_world_size,
        device=device,
        offload=config.training.enable_cpu_offload,
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
