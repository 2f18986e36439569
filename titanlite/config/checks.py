"""Checks across options, and checks of the files that a config names. Never imports torch."""

import glob
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from itertools import pairwise

from titanlite.runtime.errors import SUGGESTED, did_you_mean
from titanlite.runtime.files import is_file_url
from titanlite.schema import BatchStage, Config, Data, DataStage, LengthStage, LRScheduler, Training, Validation
from titanlite.techniques import asked_for, exclusions, places
from titanlite.techniques.technique import Conflict, reads_of


def find_conflicts(config: Config, world_size: int | None, bad_keys: Collection[str]) -> list[Conflict]:
    """Find the problems of a config whose options all have the right type.

    Args:
        config: with defaults in place of the options in bad_keys.
        world_size: number of processes, if known.
        bad_keys: options with a reported problem. Checks that read one of them are skipped.
    """
    checks: list[tuple[tuple[str, ...], Callable[[], Iterator[Conflict]]]] = [
        (("data.path", "data.sources"), lambda: _sources(config.data, "data")),
        (("data.path", "data.sources", "data.stages"), lambda: _data_stages(config.data)),
        (("data", "training.epochs"), lambda: _background(config)),
        (
            ("validation.enable", "validation.path", "validation.sources", "validation.tasks"),
            lambda: _sources(config.validation, "validation"),
        ),
        (("training.loss", "training.z_loss"), lambda: _loss(config)),
        (("training.epochs", "training.tokens"), lambda: _length(config.training)),
        (("training.seq_len", "training.seq_len_ramp"), lambda: _length_ramp(config.training)),
        (("lr_scheduler",), lambda: _schedule_unit(config.lr_scheduler)),
        (("checkpoint.folder", "checkpoint.initial_load_path"), lambda: _checkpoint_places(config)),
        (("checkpoint", "offload"), lambda: _local_copies(config)),
        (("checkpoint.enable", "guard.on_spike"), lambda: _rollback(config)),
        (("parallelism.fsdp_reduce_gradients", "training"), lambda: _check_reduce_gradients(config)),
        ((), lambda: exclusions(config)),
    ]
    if world_size is not None:
        further = ("context", "expert", "tensor", "pipeline")
        axes = ("data_parallel_replicate", "data_parallel_shard", *(f"{axis}_parallel" for axis in further))
        degrees = tuple(f"parallelism.{axis}_degree" for axis in axes)
        batch = ("training.global_batch_size", "training.local_batch_size", "training.batch_ramp")
        reshard = "parallelism.fsdp_reshard_after_forward"
        checks.append(((*degrees, reshard), lambda: _layout(config, world_size)))
        checks.append((batch, lambda: _batch(config, world_size)))
    for technique in asked_for(config):
        hooks = [partial(technique.conflicts, config)]
        hooks += [partial(technique.layout_conflicts, config, world_size)] if world_size is not None else []
        checks += [(reads_of(hook.func), hook) for hook in hooks]
    return [conflict for keys, check in checks if no_known_problem(keys, bad_keys) for conflict in check()]


def no_known_problem(keys: Iterable[str], bad_keys: Collection[str]) -> bool:
    """Return True if no problem of these options and sections is known, so that a check may read them.

    Args:
        bad_keys: options and sections with a known problem; "" stands for all.
    """
    return not any(
        bad in ("", key) or bad.startswith(f"{key}.") or key.startswith(f"{bad}.") for key in keys for bad in bad_keys
    )


def _length(training: Training) -> Iterator[Conflict]:
    if training.epochs is not None and training.tokens is not None:
        yield "training.tokens", "a run has the length of training.epochs or of training.tokens: set one of them"


def _length_ramp(training: Training) -> Iterator[Conflict]:
    yield from _check_order("training.seq_len_ramp", training.seq_len_ramp)
    for number, stage in enumerate(training.seq_len_ramp):
        if training.seq_len % stage.seq_len:
            key = f"training.seq_len_ramp.{number}.seq_len"
            yield key, f"{stage.seq_len} does not divide training.seq_len = {training.seq_len}"


def _schedule_unit(scheduler: LRScheduler) -> Iterator[Conflict]:
    if scheduler.counts_tokens:
        if scheduler.decay_steps is not None and scheduler.decay_tokens is None:
            yield (
                "lr_scheduler.decay_steps",
                "lr_scheduler.warmup_tokens makes the rate one of tokens: set decay_tokens",
            )
    elif scheduler.decay_tokens is not None:
        yield "lr_scheduler.decay_tokens", "counts only with lr_scheduler.warmup_tokens: set that too, 0 is no warm-up"


def _layout(config: Config, world_size: int) -> Iterator[Conflict]:
    parallelism = config.parallelism
    try:
        sharded = parallelism.degrees(world_size).sharded
    except ValueError as error:
        product, key = 1, ""
        model_axes = ("pipeline_parallel", "tensor_parallel", "context_parallel")
        for key in (*model_axes, "data_parallel_replicate", "data_parallel_shard"):
            product *= getattr(parallelism, f"{key}_degree")  # data_parallel_shard_degree may be -1
            if world_size % product:
                break
        hint = ": start more with NPROC, or name their number in WORLD_SIZE for a check" if world_size == 1 else ""
        yield f"parallelism.{key}_degree", f"{error}{hint}"
        return
    keep = parallelism.fsdp_reshard_after_forward
    if isinstance(keep, int) and sharded % keep:
        yield "parallelism.fsdp_reshard_after_forward", f"{keep} does not divide the {sharded} ranks that share weights"


def _batch(config: Config, world_size: int) -> Iterator[Conflict]:
    training = config.training
    try:
        ranks = config.parallelism.degrees(world_size).data_parallel
    except ValueError:  # `_layout` reports it
        return
    try:
        together = training.batch_split(ranks)[0] * ranks
    except ValueError as error:
        yield f"training.{'global' if training.global_batch_size % ranks else 'local'}_batch_size", str(error)
        return
    yield from _check_order("training.batch_ramp", training.batch_ramp)
    for number, stage in enumerate(training.batch_ramp):
        if stage.global_batch_size % together:
            yield (
                f"training.batch_ramp.{number}.global_batch_size",
                f"{stage.global_batch_size} is not a multiple of the {together} sequences in one forward pass of all "
                "processes: set training.local_batch_size, by default a process's share of a step after the ramp",
            )


def _check_order(key: str, stages: Sequence[BatchStage | DataStage | LengthStage]) -> Iterator[Conflict]:
    """Yield stages that do not end after the stage before."""
    for number, (before, stage) in enumerate(pairwise(stages), start=1):
        if stage.until_tokens <= before.until_tokens:
            where = f"{before.until_tokens}, where the stage before ends"
            yield f"{key}.{number}.until_tokens", f"{stage.until_tokens} is not after {where}"


def _data_stages(data: Data) -> Iterator[Conflict]:
    names = {source.title: None for source in data.all_sources()}
    if data.sources and not any(source.weight for source in data.sources):
        yield "data.sources", "all weights are 0: give at least one source a weight above 0"
    yield from _check_order("data.stages", data.stages)
    for number, stage in enumerate(data.stages):
        key = f"data.stages.{number}.weights"
        unknown = [name for name in stage.weights if name not in names]
        for name in unknown[:SUGGESTED]:
            yield f"{key}.{name}", f"no source is called {name!r}{did_you_mean(name, names)}"
        if rest := unknown[SUGGESTED:]:
            yield key, f"{len(rest)} more names are those of no source"
        if not any(stage.weights.values()):
            yield key, "all weights are 0: give at least one source a weight above 0"


def _background(config: Config) -> Iterator[Conflict]:
    data = config.data
    needs_all = {
        "data.shuffle": data.shuffle and data.shuffle_window is None,
        "data.packing": data.packing == "best_fit",
        "training.epochs": config.training.epochs is not None,
    }
    for key, needs in needs_all.items():
        if data.prepare == "background" and needs:
            hint = "set data.shuffle_window" if key == "data.shuffle" else 'set data.prepare = "before"'
            yield key, f'needs all sequences, and data.prepare = "background" begins before they are there: {hint}'


def _sources(section: Data | Validation, name: str) -> Iterator[Conflict]:
    sources = section.all_sources()
    if section.path and section.sources:
        yield f"{name}.sources", f"and {name}.path are both set: set one of the two"
    if isinstance(section, Validation) and section.enable and not (sources or section.tasks):
        yield f"{name}.path", f"is not set: name the data to validate on, or {name}.tasks, or set {name}.enable = false"
    elif section.path == []:
        yield f"{name}.path", "is empty: name text or tokens"
    titles = [source.title for source in sources]
    for number, source in enumerate(sources):
        key = f"{name}.sources.{number}" if section.sources else name
        if source.title in titles[:number]:
            yield f"{key}.name", f"another source is called {source.title!r} too: give each a name of its own"
        if source.path == []:
            yield f"{key}.path", "is empty: name text or tokens"
        for path in [source.path] if isinstance(source.path, str) else source.path:
            if path.startswith(("http://", "https://")) and not is_file_url(path):
                yield (
                    f"{key}.path",
                    f"{path} is a web address, which is not read: copy what it holds here first",
                )
            elif "://" in path:
                if path.partition("://")[0] not in ("stdlib", "hf", "python", "reader"):
                    yield from _url(f"{key}.path", path)
            elif not glob.glob(os.path.expanduser(path)) and not glob.glob(os.path.expanduser(f"{path}.idx")):
                yield f"{key}.path", f"no file or folder {path}"


def _loss(config: Config) -> Iterator[Conflict]:
    if config.training.loss and config.training.z_loss:
        yield "training.z_loss", "belongs to titanlite's own loss, and training.loss names another: set z_loss = 0"


def _checkpoint_places(config: Config) -> Iterator[Conflict]:
    given = {"folder": config.checkpoint.folder, "initial_load_path": config.checkpoint.initial_load_path}
    for name, place in given.items():
        if place is not None and "://" in place:
            yield from _url(f"checkpoint.{name}", place)
        elif name == "initial_load_path" and place is not None and not os.path.exists(os.path.expanduser(place)):
            yield f"checkpoint.{name}", f"no file or folder {place}"


def _local_copies(config: Config) -> Iterator[Conflict]:
    if not config.checkpoint.local_interval:
        return
    if not config.checkpoint.enable:
        yield "checkpoint.local_interval", "local copies follow checkpoints: set checkpoint.enable = true"
    if "disk" in places(config).values():
        yield (
            "checkpoint.local_interval",
            "states on disk (offload) are too large for local copies: leave one of the two out",
        )


def _rollback(config: Config) -> Iterator[Conflict]:
    if config.guard.on_spike == "rollback" and not config.checkpoint.enable:
        yield "guard.on_spike", "rollback returns to a checkpoint: set checkpoint.enable = true"


def _url(key: str, url: str) -> Iterator[Conflict]:
    import fsspec

    try:
        fsspec.get_filesystem_class(url.partition("://")[0])
    except ValueError as error:  # fsspec does not know the scheme
        yield key, str(error)
    except ImportError as error:  # its package is not installed
        from titanlite.runtime.console import install_hint

        yield key, f"{error} ({install_hint('gcs' if url.startswith(('gs:', 'gcs:')) else 's3')})"


def _check_reduce_gradients(config: Config) -> Iterator[Conflict]:
    dtypes = {config.training.mixed_precision_param, config.training.mixed_precision_reduce}
    if config.parallelism.fsdp_reduce_gradients == "last" and dtypes == {"bfloat16"}:
        yield (
            "parallelism.fsdp_reduce_gradients",
            "last would add the gradients of micro-batches in bfloat16: set training.mixed_precision_reduce = "
            '"float32", or "each"',
        )
