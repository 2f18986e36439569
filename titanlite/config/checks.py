"""What no single option can know: checks across options, and of the files that the config names. No torch here."""

import glob
import importlib.util
import os
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path

from titanlite.config.recompute import parse_policies
from titanlite.config.schema import ActivationCheckpoint, Config, Data, DataSource, Validation
from titanlite.runtime.errors import UserError

Conflict = tuple[str, str]  # dotted key, what is wrong

SHIPPED_TOKENIZERS = Path(__file__).parents[1] / "data" / "tokenizers"


def find_conflicts(config: Config, world_size: int | None, bad_keys: Collection[str]) -> list[Conflict]:
    """Problems of a config whose options are each of the right type.

    Args:
        config: with defaults in place of the options in bad_keys.
        world_size: number of processes, if known.
        bad_keys: options that were reported already; a check that would read one is left out.
    """
    checks: list[tuple[tuple[str, ...], Callable[[], Iterator[Conflict]]]] = [
        (("data.path", "data.sources"), lambda: _sources(config.data, "data")),
        (
            ("validation.enable", "validation.path", "validation.sources"),
            lambda: _sources(config.validation, "validation"),
        ),
        (("training.loss", "training.z_loss"), lambda: _loss(config)),
        (("data.tokenizer",), lambda: _tokenizer(config)),
        (("checkpoint.folder", "checkpoint.initial_load_path"), lambda: _checkpoint_places(config)),
        (
            ("activation_checkpoint.mode", "activation_checkpoint.per_block"),
            lambda: _per_block(config.activation_checkpoint),
        ),
        (("quantize", "compile", "parallelism.fsdp_reshard_after_forward"), lambda: _float8(config)),
        (("offload", "optimizer", "training.enable_cpu_offload", "quantize"), lambda: _offload(config)),
        (("optimizer", "training.max_norm", "guard"), lambda: _in_backward(config)),
    ]
    if world_size is not None:
        degrees = ("parallelism.data_parallel_replicate_degree", "parallelism.data_parallel_shard_degree")
        batch = ("training.global_batch_size", "training.local_batch_size")
        checks.append(((*degrees, "parallelism.fsdp_reshard_after_forward"), lambda: _layout(config, world_size)))
        checks.append((batch, lambda: _batch(config, world_size)))
        checks.append((("optimizer.in_backward", *batch), lambda: _one_micro_batch(config, world_size)))
    return [conflict for reads, check in checks if are_right(reads, bad_keys) for conflict in check()]


def are_right(keys: Iterable[str], bad_keys: Collection[str]) -> bool:
    """Whether nothing wrong is known of options and sections, so that a check may read them.

    Args:
        bad_keys: options and sections; "" stands for all.
    """
    return not any(
        bad in ("", key) or bad.startswith(f"{key}.") or key.startswith(f"{bad}.") for key in keys for bad in bad_keys
    )


def _layout(config: Config, world_size: int) -> Iterator[Conflict]:
    parallelism = config.parallelism
    try:
        _, shard = parallelism.degrees(world_size)
    except ValueError as error:
        axis = "replicate" if parallelism.data_parallel_shard_degree == -1 else "shard"
        hint = ": start more with NPROC, or name their number in WORLD_SIZE for a check" if world_size == 1 else ""
        yield f"parallelism.data_parallel_{axis}_degree", f"{error}{hint}"
        return
    keep = parallelism.fsdp_reshard_after_forward
    if isinstance(keep, int) and shard % keep:
        yield "parallelism.fsdp_reshard_after_forward", f"{keep} does not divide the shard degree {shard}"


def _batch(config: Config, world_size: int) -> Iterator[Conflict]:
    training = config.training
    try:
        training.batch_split(world_size)
    except ValueError as error:
        uneven_share = training.global_batch_size % world_size == 0
        yield f"training.{'local' if uneven_share else 'global'}_batch_size", str(error)


def _in_backward(config: Config) -> Iterator[Conflict]:
    optimizer, key = config.optimizer, "optimizer.in_backward"
    if not optimizer.in_backward:
        return
    if config.training.max_norm:
        yield key, "updates before the norm of all gradients is known: set training.max_norm = 0 (no clipping)"
    if "Muon" in [group.name or optimizer.name for group in optimizer.groups or [optimizer]]:
        yield key, "updates parameters one by one, and Muon matrices of all ranks together: choose one of the two"
    if config.guard.nonfinite == "skip":
        yield key, 'cannot leave out a step that has begun: set guard.nonfinite = "stop"'
    if config.guard.spike_sigma:
        yield key, "cannot leave out a step that has begun: set guard.spike_sigma = 0"


def _one_micro_batch(config: Config, world_size: int) -> Iterator[Conflict]:
    training = config.training
    try:
        micro, accumulation = training.batch_split(world_size)
    except ValueError:
        return  # told by `_batch`
    if config.optimizer.in_backward and accumulation > 1:
        yield (
            "optimizer.in_backward",
            f"updates after each forward pass, and a step has {accumulation} of {micro} sequences on each of the "
            f"{world_size} processes: set training.global_batch_size = {micro * world_size}, or raise "
            "training.local_batch_size",
        )


def _sources(section: Data | Validation, name: str) -> Iterator[Conflict]:
    sources = section.all_sources()
    if section.path and section.sources:
        yield f"{name}.sources", f"take the place of {name}.path: give one of the two"
    if section.path == [] or (isinstance(section, Validation) and section.enable and not sources):
        yield f"{name}.path", "names nothing"
    titles = [source.title for source in sources]
    for number, source in enumerate(sources):
        key = f"{name}.sources.{number}" if section.sources else name
        if source.title in titles[:number]:
            yield f"{key}.name", f"another source is called {source.title!r} as well: give them names"
        if source.path == []:
            yield f"{key}.path", "names nothing"
        for option in ("weight", "epochs") if isinstance(section, Validation) else ():
            if getattr(source, option) != DataSource.model_fields[option].default:
                yield f"{key}.{option}", "has no effect in validation, which reads each source once: remove it"
        for path in [source.path] if isinstance(source.path, str) else source.path:
            if "://" in path:
                if path.partition("://")[0] not in ("stdlib", "hf", "python"):
                    yield from _url(f"{key}.path", path)
            elif not glob.glob(os.path.expanduser(path)):
                yield f"{key}.path", f"no file or folder {path}"


def _loss(config: Config) -> Iterator[Conflict]:
    if config.training.loss and config.training.z_loss:
        yield "training.z_loss", "is part of titanlite's own loss, and training.loss names another"


def _tokenizer(config: Config) -> Iterator[Conflict]:
    name = config.data.tokenizer
    if name == "bytes" or (os.sep not in name and (SHIPPED_TOKENIZERS / f"{name}.model").is_file()):
        return  # the import below brings numpy, which takes longer than all else that is done here
    from titanlite.data.tokenizer import find_tokenizer

    try:
        find_tokenizer(name)
    except UserError as error:
        yield "data.tokenizer", str(error)


def _checkpoint_places(config: Config) -> Iterator[Conflict]:
    places = {"folder": config.checkpoint.folder, "initial_load_path": config.checkpoint.initial_load_path}
    for name, place in places.items():
        if place is not None and "://" in place:
            yield from _url(f"checkpoint.{name}", place)
        elif name == "initial_load_path" and place is not None and not os.path.isdir(os.path.expanduser(place)):
            yield f"checkpoint.{name}", f"no folder {place}"


def _url(key: str, url: str) -> Iterator[Conflict]:
    import fsspec

    try:
        fsspec.get_filesystem_class(url.partition("://")[0])
    except ValueError as error:  # not known
        yield key, str(error)
    except ImportError as error:  # known, and not installed
        yield key, f"{error} (pip install 'titanlite[s3]' or 'titanlite[gcs]')"


def _per_block(config: ActivationCheckpoint) -> Iterator[Conflict]:
    key = "activation_checkpoint.per_block"
    if (config.mode == "per_block") != bool(config.per_block):
        yield key, 'goes together with activation_checkpoint.mode = "per_block": set both or none of them'
    try:
        parse_policies(config.per_block)
    except ValueError as error:
        yield key, str(error)


def _float8(config: Config) -> Iterator[Conflict]:
    float8 = config.quantize.linear.float8
    if not float8.enable:
        return
    if importlib.util.find_spec("torchao") is None:
        yield "quantize.linear.float8.enable", "needs torchao: pip install 'titanlite[float8]'"
    keep = config.parallelism.fsdp_reshard_after_forward
    gathers_float8 = float8.enable_fsdp_float8_all_gather and float8.recipe_name == "tensorwise"
    if gathers_float8 and isinstance(keep, int) and keep > 1:
        other = "quantize.linear.float8.enable_fsdp_float8_all_gather"
        yield "parallelism.fsdp_reshard_after_forward", f"FSDP2 cannot combine {keep} with {other}"
    if not config.compile.enable and not float8.emulate:
        yield "quantize.linear.float8.enable", "is slower than bfloat16 without compile.enable = true"


def _offload(config: Config) -> Iterator[Conflict]:
    offload, optimizer, float8 = config.offload, config.optimizer, config.quantize.linear.float8
    if not offload.is_used:
        if offload.path is not None:
            yield "offload.path", 'is for nothing: neither offload.optimizer nor offload.parameters is "disk"'
        return
    if sys.platform != "linux":
        yield "offload", "files instead of memory need Linux"
    key = "offload.optimizer" if offload.optimizer == "disk" else "offload.parameters"
    names = {group.name or optimizer.name for group in optimizer.groups} or {optimizer.name}
    if others := ", ".join(sorted(names - {"AdamW"})):
        yield key, f"disk is for AdamW, and not for {others}"
    elif optimizer.args or any(group.args for group in optimizer.groups):
        yield key, "AdamW takes no optimizer.args on disk"
    if offload.parameters == "disk":
        if not config.training.enable_cpu_offload:
            yield "offload.parameters", "disk needs training.enable_cpu_offload = true"
        if float8.enable and float8.enable_fsdp_float8_all_gather and float8.recipe_name == "tensorwise":
            other = "quantize.linear.float8.enable_fsdp_float8_all_gather"
            yield "offload.parameters", f"disk does not go with {other} = true"
    if offload.path is not None:
        yield from _writable("offload.path", offload.path)


def _writable(key: str, folder: str) -> Iterator[Conflict]:
    """That a folder is there, or can be made."""
    path = Path(os.path.expanduser(folder)).absolute()
    there = next(place for place in (path, *path.parents) if os.path.exists(place))
    if not there.is_dir():
        yield key, f"{there} is not a folder"
    elif not os.access(there, os.W_OK | os.X_OK):
        yield key, f"{there} cannot be written"
