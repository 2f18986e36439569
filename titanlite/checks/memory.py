"""Memory and disk that a model needs for training, checked before anything is allocated."""

from collections.abc import Sequence
from pathlib import Path

import torch

from titanlite.models.base import Model, trainable_parameters, unique_parameters
from titanlite.models.quantized import quantized_parameters
from titanlite.optim.state_size import state_bytes
from titanlite.runtime.dtypes import DTYPES
from titanlite.runtime.errors import UserError
from titanlite.runtime.hardware import host_memory
from titanlite.runtime.process_group import Ranks
from titanlite.schema import Config, Degrees
from titanlite.storage.disk import check_room, folder_of
from titanlite.techniques import keeps_gradients


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
    degrees = config.parallelism.degrees(ranks.world_size)
    needed = {config.training.enable_cpu_offload: even_share(model, degrees) * in_memory}
    if teacher is not None:
        size = DTYPES[config.teacher.dtype or config.training.mixed_precision_param].size
        place = config.teacher.enable_cpu_offload
        needed[place] = needed.get(place, 0) + even_share(teacher, degrees._replace(tensor=1)) * size
    if device.type == "cpu":  # host memory is all there is
        needed = {False: sum(needed.values())}
    for offload, size in needed.items():
        check_memory(
            size,
            parameters=[sum(p.numel() for _, p in unique_parameters(it)) for it in (model, teacher) if it is not None],
            shard_degree=degrees.sharded,
            local_world_size=ranks.local_world_size,
            device=device,
            offload=offload,
        )


def check_model_disk(model: Model, config: Config, ranks: Ranks) -> None:
    _, on_disk = bytes_per_parameter(model, config)
    of_a_rank = on_disk * even_share(model, config.parallelism.degrees(ranks.world_size))
    folder = folder_of(config.offload, Path(config.job.dump_folder, str(config.job.name)))
    check_room(folder, of_a_rank * ranks.local_world_size)


def weight_bytes(model: Model, config: Config) -> int:
    """Return the bytes of a model's parameters, unsharded.

    Args:
        model: with its frozen and quantized parameters.
    """
    quantized, dtype = quantized_parameters(model), config.training.dtype
    sizes = {True: DTYPES[dtype].size, False: DTYPES[config.freeze.dtype or dtype].size}
    parameters = [parameter for _, parameter in unique_parameters(model)]
    return sum(it.numel() * (it.itemsize if it in quantized else sizes[it.requires_grad]) for it in parameters)


def even_share(model: Model, degrees: Degrees) -> float:
    """Return the number of elements of a model that a rank has if parameters split evenly: no rank can have fewer."""
    return sum(it.numel() for _, it in unique_parameters(model)) / (degrees.sharded * degrees.tensor)


def bytes_per_parameter(model: Model, config: Config) -> tuple[float, float]:
    """Return the bytes (in memory, on disk) of a parameter with its gradient and its optimizer states.

    With updates in backward the gradients of one FSDP unit exist at a time, which are not counted.
    """
    parameters = sum(p.numel() for p in model.parameters())
    trained = sum(p.numel() for p in trainable_parameters(model).values()) / parameters
    size = DTYPES[config.training.dtype].size
    weight = weight_bytes(model, config) / parameters
    gradient = trained * size if keeps_gradients(config) else 0
    moments = state_bytes(config.optimizer, model, dtype=config.training.dtype) / parameters
    on_disk = weight * (config.offload.parameters == "disk") + moments * (config.offload.optimizer == "disk")
    return weight + gradient + moments - on_disk, on_disk


def check_memory(
    needed: float,
    *,
    parameters: Sequence[int],
    shard_degree: int,
    local_world_size: int,
    device: torch.device,
    offload: bool,
) -> None:
    """Compare the least memory that a step needs with the available memory, before anything is allocated.

    Args:
        needed: bytes of a process for parameters, gradients and optimizer states, but for what is on disk.
        parameters: number of the model's parameters, and of the teacher's if there is one.

    Raises:
        UserError: it does not fit, with both numbers.
    """
    if device.type == "cuda" and not offload:
        available, place = torch.cuda.get_device_properties(device).total_memory, "the GPU"
    else:
        available = host_memory() / local_world_size
        place = "this machine (it has no GPU)" if device.type == "cpu" else "this machine"
        place += f", for each of {local_world_size} processes," if local_world_size > 1 else ""
    if needed > available:
        what, with_teacher, or_offload = "the model does not fit", "", ""
        if len(parameters) > 1:
            what, with_teacher = "the model and the teacher do not fit", f" and the {parameters[1]:,} of the teacher"
            or_offload = ", or set teacher.enable_cpu_offload = true" if device.type == "cuda" and not offload else ""
        raise UserError(
            f"{what}: parameters, gradients and optimizer states of its {parameters[0]:,} parameters{with_teacher} "
            f"take {needed / 2**30:,.1f} GiB on each process (sharded over {shard_degree}), and {place} has "
            f"{available / 2**30:,.1f} GiB. Use more processes, a higher shard degree, or a smaller flavor{or_offload}"
        )
