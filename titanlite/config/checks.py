"""What no single option can know: checks across options, and of the files that the config names. No torch here."""

import glob
import importlib.util
import os
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path

from titanlite.config.schema import ActivationCheckpoint, Config, Data, Validation
from titanlite.errors import UserError

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
            ("activation_checkpoint.mode", "activation_checkpoint.memory_budget_gib"),
            lambda: _memory_budget(config.activation_checkpoint),
        ),
        (("quantize", "compile", "parallelism.fsdp_reshard_after_forward"), lambda: _float8(config)),
    ]
    if world_size is not None:
        degrees = ("parallelism.data_parallel_replicate_degree", "parallelism.data_parallel_shard_degree")
        batch = ("training.global_batch_size", "training.local_batch_size")
        checks.append(((*degrees, "parallelism.fsdp_reshard_after_forward"), lambda: _layout(config, world_size)))
        checks.append((batch, lambda: _batch(config, world_size)))
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


def _memory_budget(config: ActivationCheckpoint) -> Iterator[Conflict]:
    key = "activation_checkpoint.memory_budget_gib"
    if config.mode == "budget" and config.memory_budget_gib is None:
        yield key, "mode budget needs it: most memory of each device, in GiB"


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
