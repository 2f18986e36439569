"""What no single option can know: checks across options, and of the files that the config names. No torch here."""

import glob
import importlib.util
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from titanlite.config.schema import Config

STDLIB = "stdlib://"
Conflict = tuple[str, str]  # dotted key, what is wrong


def find_conflicts(config: Config, world_size: int | None, bad_keys: set[str]) -> list[Conflict]:
    """Problems of a config whose options are each of the right type.

    Args:
        config: with defaults in place of the options in bad_keys.
        world_size: number of processes, if known.
        bad_keys: options that were reported already; a check that would read one is left out.
    """
    checks: list[tuple[tuple[str, ...], Callable[[], Iterator[Conflict]]]] = [
        (("data.path",), lambda: _data_path(config)),
        (("data.tokenizer",), lambda: _tokenizer(config)),
        (("checkpoint.folder", "checkpoint.initial_load_path"), lambda: _checkpoint_places(config)),
        (("quantize", "compile", "parallelism.fsdp_reshard_after_forward"), lambda: _float8(config)),
    ]
    if world_size is not None:
        batch = ("training.global_batch_size", "training.local_batch_size")
        checks.append((("parallelism", *batch), lambda: _layout(config, world_size)))
    return [
        conflict
        for reads, check in checks
        if not any(bad == key or bad.startswith(f"{key}.") for key in reads for bad in bad_keys)
        for conflict in check()
    ]


def _layout(config: Config, world_size: int) -> Iterator[Conflict]:
    parallelism, training = config.parallelism, config.training
    try:
        _, shard = parallelism.degrees(world_size)
    except ValueError as error:
        axis = "replicate" if parallelism.data_parallel_shard_degree == -1 else "shard"
        yield f"parallelism.data_parallel_{axis}_degree", str(error)
        return
    keep = parallelism.fsdp_reshard_after_forward
    if isinstance(keep, int) and shard % keep:
        yield "parallelism.fsdp_reshard_after_forward", f"{keep} does not divide the shard degree {shard}"
    try:
        training.batch_split(world_size)
    except ValueError as error:
        uneven_share = training.global_batch_size % world_size == 0
        yield f"training.{'local' if uneven_share else 'global'}_batch_size", str(error)


def _data_path(config: Config) -> Iterator[Conflict]:
    paths = config.data.path or STDLIB
    for path in [paths] if isinstance(paths, str) else paths:
        if path != STDLIB and not glob.glob(os.path.expanduser(path)):
            yield "data.path", f"no file or folder {path}"
    if paths == []:
        yield "data.path", "names nothing to train on"


def _tokenizer(config: Config) -> Iterator[Conflict]:
    name = config.data.tokenizer
    path = Path(name).expanduser()
    if name != "bytes" and not path.is_file():
        yield "data.tokenizer", f"no file {name} (a tiktoken rank file, or the word bytes)"


def _checkpoint_places(config: Config) -> Iterator[Conflict]:
    places = {"folder": config.checkpoint.folder, "initial_load_path": config.checkpoint.initial_load_path}
    for name, place in places.items():
        if place is not None and "://" in place:
            import fsspec

            try:
                fsspec.get_filesystem_class(place.partition("://")[0])
            except ValueError as error:  # not known
                yield f"checkpoint.{name}", str(error)
            except ImportError as error:  # known, and not installed
                extra = " (pip install 'titanlite[s3]' or 'titanlite[gcs]')"
                yield f"checkpoint.{name}", f"{error}{extra}"
        elif name == "initial_load_path" and place is not None and not os.path.isdir(os.path.expanduser(place)):
            yield f"checkpoint.{name}", f"no folder {place}"


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
