"""Disk space, files and host memory that a run needs, from its config."""

import math
from dataclasses import dataclass

from titanlite.checkpoint import manifest as manifests
from titanlite.checkpoint.storage import open_storage
from titanlite.config.schema import Checkpoint, Config, Data, Validation
from titanlite.data.prepared import STDLIB, prepared_tokens
from titanlite.data.tokenizer import Tokenizer
from titanlite.ingest.inputs import find_files
from titanlite.memory_check import SIZES, bytes_per_parameter, weight_bytes
from titanlite.models.base import Model, unique_parameters
from titanlite.optim.state_size import state_bytes
from titanlite.selfcheck.findings import size_text

SMALL_FILES = 5
"""Files of a checkpoint beside one for each rank: manifest, metadata, checksums, config, mark of the owner."""
EXPORT_FILES = 12
TEXT_PER_TOKEN = 3.0
"""Bytes of text in a token, at the least, but for the tokenizer "bytes"."""


@dataclass(frozen=True)
class Need:
    """Space that one part of a run takes in one place."""

    what: str
    place: str
    bytes: float
    files: int = 0
    is_estimate: bool = False
    """Too little space is a warning only."""


def checkpoint_bytes(model: Model, config: Config) -> int:
    """Return the bytes of a checkpoint: parameters, frozen ones too, and optimizer states.

    Args:
        model: with its frozen parameters frozen.
    """
    return weight_bytes(model, config) + state_bytes(config.optimizer, model, dtype=config.training.dtype)


def kept_checkpoints(checkpoint: Checkpoint, steps: int) -> int:
    """Return the largest number of checkpoints that exist at the same time, with the one that is being written."""
    saves = math.ceil(steps / checkpoint.interval)
    if not checkpoint.keep_latest_k:
        return saves
    further = steps // math.lcm(checkpoint.interval, checkpoint.keep_every) if checkpoint.keep_every else 0
    return min(saves, checkpoint.keep_latest_k + further + 1)


def disk_needs(config: Config, model: Model, tokenizer: Tokenizer, *, world_size: int, nodes: int) -> list[Need]:
    """Return what the run still writes, beyond the checkpoints that it has."""
    needs = [*_checkpoint_needs(config, model, world_size), *_cache_needs(config, tokenizer)]
    if config.checkpoint.enable and (local := config.checkpoint.local_path):
        share = checkpoint_bytes(model, config) / nodes
        needs.append(Need(f"this host's part of a save, {size_text(share)}", local, share, world_size // nodes + 1))
    return needs


def _checkpoint_needs(config: Config, model: Model, world_size: int) -> list[Need]:
    checkpoint, run = config.checkpoint, f"{config.job.dump_folder}/{config.job.name}"
    if not checkpoint.enable:
        return []
    needs = []
    steps = config.training.steps  # with training.epochs, the number is known when the data is open
    url, each = checkpoint.folder or f"{run}/checkpoints", checkpoint_bytes(model, config)
    if "://" not in url:
        count = kept_checkpoints(checkpoint, steps)
        there = [sum(files.values()) for name, files in open_storage(url).list().items() if manifests.step_of(name)]
        text = f"{count:,} checkpoints of {size_text(each)}" + (f", {len(there)} of them are there" if there else "")
        files = (count - min(count, len(there))) * (world_size + SMALL_FILES)
        needs.append(Need(text, url, max(0, count * each - sum(there)), files, config.training.epochs is not None))
    exports = f"{checkpoint.folder}/exports" if checkpoint.folder else f"{run}/exports"
    number = (steps // checkpoint.export_every if checkpoint.export_every else 0) + checkpoint.last_save_in_hf
    if number and "://" not in exports:
        size = sum(p.numel() for _, p in unique_parameters(model)) * SIZES[checkpoint.export_dtype]
        text = f"{number:,} exports of {size_text(size)}"
        needs.append(Need(text, exports, number * size, number * EXPORT_FILES))
    return needs


def _cache_needs(config: Config, tokenizer: Tokenizer) -> list[Need]:
    """Return the space of tokens made from text. A cache of an earlier run may have them: it is an estimate."""
    text = _text_bytes(config.data) + _text_bytes(config.validation)
    if not text:
        return []
    cache = config.data.cache_folder or f"{config.job.dump_folder}/data_cache"
    per_token = 1.0 if tokenizer.name == "bytes" else TEXT_PER_TOKEN
    size = text / per_token * (2 if tokenizer.vocab_size <= 2**16 else 4)
    return [Need(f"tokens of {size_text(text)} of text", cache, size, is_estimate=True)]


def _text_bytes(section: Data | Validation) -> int:
    total = 0
    for source in section.all_sources():
        paths = [source.path] if isinstance(source.path, str) else source.path
        is_text = prepared_tokens(paths) is None and not any("://" in path for path in paths if path != STDLIB)
        total += sum(file.size for file in find_files(paths)) if is_text else 0
    return total


def staging_bytes(config: Config, model: Model, *, world_size: int, local_world_size: int) -> float:
    """Return the host memory of each host that background saves take: a copy of the state of its ranks."""
    if not config.checkpoint.enable or config.checkpoint.async_mode == "disabled":
        return 0
    return checkpoint_bytes(model, config) / config.parallelism.degrees(world_size).shard * local_world_size


def state_in_host_memory(
    config: Config, model: Model, *, world_size: int, local_world_size: int, is_cpu: bool
) -> float:
    """Return the bytes of parameters, gradients and optimizer states in a host's memory, but for what is on disk."""
    if not (is_cpu or config.training.enable_cpu_offload):
        return 0
    parameters = sum(parameter.numel() for _, parameter in unique_parameters(model))
    each, _ = bytes_per_parameter(model, config)
    return parameters * each / config.parallelism.degrees(world_size).shard * local_world_size
