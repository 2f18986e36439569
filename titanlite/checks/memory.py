"""Memory and disk that a model needs for training, checked before anything is allocated."""

import torch

from titanlite.checkpoint.manifest import KEPT_COPIES
from titanlite.models.base import Model, trainable_parameters, unique_parameters
from titanlite.models.frozen import FrozenModel
from titanlite.optim.state_size import state_bytes
from titanlite.runtime.dtypes import DTYPES
from titanlite.runtime.errors import ConfigError, Problem, UserError
from titanlite.runtime.files import memory_folder, room_in
from titanlite.runtime.hardware import host_memory
from titanlite.runtime.process_group import Ranks
from titanlite.schema import Config, Degrees
from titanlite.techniques import places


def check_model_memory(
    model: Model, config: Config, ranks: Ranks, device: torch.device, *, frozen: FrozenModel | None = None
) -> None:
    """Compare the least memory that a step needs with the available memory, before anything is allocated.

    Args:
        frozen: model beside the one that is trained.

    Raises:
        UserError: it does not fit, with both numbers, or local copies do not fit in their folder's file system.
    """
    in_memory, _ = bytes_per_parameter(model, config)
    degrees = config.parallelism.degrees(ranks.world_size)
    needed = {"parameters" in places(config): even_share(model, degrees) * in_memory}
    count, or_host = f"{_count(model):,} parameters", ""
    if frozen is not None:
        other, on_host = frozen.build(config.training.seq_len), frozen.is_on_host
        share = even_share(other, degrees._replace(tensor=1)) * DTYPES[frozen.dtype].size
        needed[on_host] = needed.get(on_host, 0) + share
        count += f" and the {_count(other):,} of the {frozen.section}"
        or_host = f", or set {frozen.section}.enable_cpu_offload = true"
    if device.type == "cpu":  # host memory is all there is
        needed = {True: sum(needed.values())}
    _check_room_for_copies(model, config, ranks)
    if copies := copies_in_memory(config, machines=ranks.world_size // ranks.local_world_size):
        needed[True] = needed.get(True, 0) + copies * copied_bytes(model, config, ranks)
        count += f" and {copies} copies of them (checkpoint.local_interval)"
    for on_host, size in needed.items():
        if on_host:
            available, place = host_memory() / ranks.local_world_size, "this machine"
            place += " (it has no GPU)" if device.type == "cpu" else ""
            place += f", for each of {ranks.local_world_size} processes," if ranks.local_world_size > 1 else ""
        else:
            available, place = torch.cuda.get_device_properties(device).total_memory, "the GPU"
        if size > available:
            raise UserError(
                f"the model does not fit: parameters, gradients and optimizer states of its {count} take "
                f"{size / 2**30:,.1f} GiB on each process (sharded over {degrees.sharded}), and {place} has "
                f"{available / 2**30:,.1f} GiB. Use more processes, a higher shard degree, or a smaller flavor"
                f"{'' if on_host else or_host}"
            )


def copies_in_memory(config: Config, machines: int) -> int:
    """Return how many copies of a rank's share of the state are in host memory for local copies: one that is staged,
    and in a folder in memory those that stay and the next one, on each machine that keeps them."""
    checkpoint = config.checkpoint
    if not checkpoint.local_interval:
        return 0
    in_memory = checkpoint.local_folder is None or checkpoint.local_folder.startswith("/dev/shm")
    return 1 + in_memory * (KEPT_COPIES + 1) * min(checkpoint.local_copies, machines)


def copied_bytes(model: Model, config: Config, ranks: Ranks) -> float:
    """Return the bytes that a rank writes into a local copy."""
    degrees = config.parallelism.degrees(ranks.world_size)
    state = even_share(model, degrees) * state_per_parameter(model, config)
    return state / (1 if config.outer.over_replicas else degrees.replicate)  # workers have states of their own


def _check_room_for_copies(model: Model, config: Config, ranks: Ranks) -> None:
    """Check that the file system of local copies could hold the newest one and the next, if it were empty.

    Raises:
        UserError: it could not.
    """
    checkpoint = config.checkpoint
    if not checkpoint.local_interval:
        return
    kept = min(checkpoint.local_copies, ranks.world_size // ranks.local_world_size)
    needed = 2 * kept * ranks.local_world_size * copied_bytes(model, config, ranks)
    folder = memory_folder(checkpoint.local_folder)
    if 0 < (whole := room_in(folder).whole) < needed:
        text = (
            f"{folder} is on a file system of {whole / 2**20:,.0f} MiB, and the newest local copy and the next take "
            f"{needed / 2**20:,.0f} MiB on this machine. Name a larger one in checkpoint.local_folder, or enlarge it "
            "(docker run --shm-size)"
        )
        raise ConfigError([Problem("checkpoint.local_interval", text)])


def bytes_on_disk(model: Model, config: Config, ranks: Ranks) -> float:
    """Return the bytes that the processes of a machine have on disk."""
    _, on_disk = bytes_per_parameter(model, config)
    return on_disk * even_share(model, config.parallelism.degrees(ranks.world_size)) * ranks.local_world_size


def weight_bytes(model: Model, config: Config) -> int:
    """Return the bytes of a model's parameters, unsharded.

    Args:
        model: with its frozen parameters.
    """
    dtype = config.training.dtype
    sizes = {True: DTYPES[dtype].size, False: DTYPES[config.freeze.dtype or dtype].size}
    return sum(parameter.numel() * sizes[parameter.requires_grad] for _, parameter in unique_parameters(model))


def even_share(model: Model, degrees: Degrees) -> float:
    """Return the number of elements of a model that a rank has if parameters split evenly: no rank can have fewer."""
    return _count(model) / (degrees.sharded * degrees.tensor * degrees.pipeline)


def _count(model: Model) -> int:
    return sum(parameter.numel() for _, parameter in unique_parameters(model))


def bytes_per_parameter(model: Model, config: Config) -> tuple[float, float]:
    """Return the bytes (in memory, on disk) of a parameter with its gradient and its optimizer states.

    With updates in backward the gradients of one FSDP unit exist at a time, which are not counted.
    """
    parameters = sum(p.numel() for p in model.parameters())
    trained = sum(p.numel() for p in trainable_parameters(model).values()) / parameters
    size = DTYPES[config.training.dtype].size
    weight = weight_bytes(model, config) / parameters
    gradient = trained * size if not config.optimizer.in_backward else 0
    moments = state_per_parameter(model, config) - weight
    place_of = places(config)
    on_disk = weight * (place_of.get("parameters") == "disk") + moments * (place_of.get("optimizer") == "disk")
    return weight + gradient + moments - on_disk, on_disk


def state_per_parameter(model: Model, config: Config) -> float:
    """Return the bytes of a parameter and its optimizer states."""
    parameters = sum(p.numel() for p in model.parameters())
    moments = state_bytes(config.optimizer, model, dtype=config.training.dtype)
    return (weight_bytes(model, config) + moments) / parameters
