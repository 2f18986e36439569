"""Weights of a checkpoint, a run or another program, opened with their model; needs no process group and no GPU."""

import json
import re
import sys
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import ReadItem

from titanlite.checkpoint import manifest as manifests
from titanlite.checkpoint.dcp_read import RankReader, ShardReader, UnsafeCheckpoint
from titanlite.checkpoint.difference import difference
from titanlite.checkpoint.initial import find_checkpoint, stored_tensors
from titanlite.checkpoint.manifest import Manifest
from titanlite.checks.preflight import check_decoder, select_model
from titanlite.config.foreign import read_foreign
from titanlite.config.load import load
from titanlite.data.tokenizer import Tokenizer, find_copy, is_shipped, load_tokenizer
from titanlite.models.base import Model
from titanlite.models.frozen import ModelWeights
from titanlite.models.pytorch_layers import use_kernels
from titanlite.models.registry import ModelSpec, resolve_model, vocab_size_for
from titanlite.ops import pick_kernels
from titanlite.ops.mean import rounded_once, weighted_mean
from titanlite.parallelize.materialize import allocate, set_dtype
from titanlite.runtime.errors import ConfigError, UserError
from titanlite.runtime.files import file_inside, read_small
from titanlite.schema import Config, Data, ModelSelection
from titanlite.state import AVERAGE, model_state
from titanlite.storage.storage import Storage, open_storage
from titanlite.tools.convert.adapters import Adapters, MergedReader, find_adapters
from titanlite.tools.convert.hugging_face import HuggingFaceFolder
from titanlite.tools.convert.prompts import opening_ids
from titanlite.tools.convert.reader import ForeignSource, load_tensors, read_whole
from titanlite.tools.convert.tokenizer_files import Generation, read_generation
from titanlite.tools.convert.weights import check_args, find_flavor, find_source, open_reader, table_of

ORIGIN = "origin.json"
"""File of an imported checkpoint; see `OpenedWeights.origin`."""
SAMPLES, SAMPLE = 16, 2**18
"""Number and bytes of the parts of a file whose checksum stands for the whole."""


@dataclass(frozen=True, kw_only=True)
class OpenedWeights:
    """Weights, and the model that computes with them. Adapters are merged."""

    spec: ModelSpec
    config: Config | None
    """Config of the run: that which the user names, or the part of the checkpoint's own that runs no code. None for
    weights of another program."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Options of the checkpoint's own config that name data or templates, which are not in `config`."""
    tokenizer: Tokenizer | None
    """Tokenizer of the weights. None if it cannot be loaded on this machine."""
    no_tokenizer: str = ""
    """Reason why the tokenizer that the weights name cannot be loaded."""
    where: str
    """Path or URL, for error messages."""
    reader: RankReader
    """Reader of tensors, whose names are "model." and the model's own."""
    generation: Generation | None = None
    """What the program that the weights come from states about generation. None for weights that we trained."""
    adapters: Adapters | None = None
    """Adapters that `reader` merges into the weights. None: there are none."""
    identity: str = ""
    """Text that differs for other weights: a hash of names and checksums of the files."""

    @property
    def metadata(self) -> Metadata:
        return self.reader.read_metadata()

    @property
    def origin(self) -> dict[str, Any] | None:
        """What an imported checkpoint keeps of weights of another program, beside the config. None for ours."""
        if self.generation is None:
            return None
        has_tokenizer = self.tokenizer is not None or bool(self.no_tokenizer)
        return {"has_tokenizer": has_tokenizer, "ids": self.generation.ids, "config": self.generation.config}


def open_source(
    path: str,
    *,
    config: str | Path | None = None,
    tokenizer: str | None = None,
    model_file: str | None = None,
    average: bool = False,
) -> OpenedWeights:
    """Open a checkpoint: its folder, the folder of a run (its newest complete checkpoint), or a URL of either.

    Args:
        config: config of the run, for checkpoints that do not keep it, or that name code or data.
        tokenizer: replaces `data.tokenizer` of the config.
        model_file: code of a model of the user's own. That which a checkpoint names is refused.
        average: take the average of the weights in their place; see `AverageReader`.

    Weights of another program are opened, too, if they describe their model.

    Raises:
        UserError: there is no checkpoint, it is damaged, it has no average, or its model is unknown.
    """
    if (foreign := find_source(path)) is not None:
        if average:
            raise UserError(f"--average: {path} was written by another program")
        if model_file is not None:
            raise UserError(
                f"--model-file: {path} was written by another program: name a config with the model, with --config"
            )
        return open_foreign(foreign, config=config, tokenizer=tokenizer)[0]
    try:
        url, folder, manifest = find_checkpoint(path)
        storage = open_storage(url)
        stored = ShardReader(storage, folder, manifest)
    except (ValueError, ImportError, NotADirectoryError) as error:  # the file is damaged, or fsspec refuses the URL
        raise error if isinstance(error, UserError) else UserError(f"{path}: {error}") from None
    where = storage.url_of(folder)
    whole = AverageReader(stored, where) if average else stored
    adapters = find_adapters(whole, manifest.settings)
    reader = MergedReader(adapters) if adapters else whole
    run_config, refused = _read_config(storage, folder, manifest, config, model_file)
    imported: dict[str, Any] | None = None
    if tokenizer is None and ORIGIN in manifest.files:
        imported = json.loads(manifests.read_checked(storage, folder, ORIGIN, manifest))
    found, reason = None, ""
    if tokenizer is not None:
        found, reason = _load_tokenizer(tokenizer, must_exist=True)
    elif imported is None or imported["has_tokenizer"]:
        name = run_config.data.tokenizer
        found, reason = (
            _own_tokenizer(storage, name, path) if config is None else _load_tokenizer(name, must_exist=False)
        )
    identity = " ".join(f"{name} {record.crc32}" for name, record in sorted(manifest.files.items()))
    return OpenedWeights(
        spec=_as_trained(_model_of(run_config.model, manifest, found, where), manifest, reader.metadata),
        config=run_config,
        refused=refused,
        tokenizer=found,
        no_tokenizer=reason,
        where=where,
        reader=reader,
        generation=Generation(imported["ids"], imported["config"]) if imported else None,
        adapters=adapters,
        identity=identity,
    )


def open_foreign(
    foreign: ForeignSource,
    *,
    model: str | None = None,
    flavor: str | None = None,
    config: str | Path | None = None,
    tokenizer: str | None = None,
) -> tuple[OpenedWeights, Config]:
    """Open weights of another program. Return them, and a config that has their model and their tokenizer.

    Args:
        model: name of the family; None takes what the weights describe.
        flavor: of the family; None takes what the weights describe.
        config: config with the model, instead of name and flavor.
        tokenizer: replaces that beside the weights.

    Raises:
        UserError: the weights are of another model, or do not describe it.
    """
    if config is None:
        spec, loaded = _describe(foreign, model, flavor)
    else:
        loaded = load(config)
        spec = select_model(loaded.model, load_tokenizer(loaded.data.tokenizer))
    args = foreign.read_args(spec.model_cls)
    if args is not None and (flavor or config):
        check_args(foreign.where, args, spec, loaded.checkpoint.allow_changes)
    name = tokenizer or (None if foreign.tokenizer() is None and config is None else loaded.data.tokenizer)
    found, reason = _load_tokenizer(name, must_exist=tokenizer is not None) if name else (None, "")
    if config is None and found:
        begins = found.bos_id in (None, *opening_ids(found, None))
        loaded = loaded.model_copy(update={"data": loaded.data.model_copy(update={"add_bos": begins})})
    generation = None
    if tokenizer is None:
        generation = read_generation(foreign.folder) if isinstance(foreign, HuggingFaceFolder) else Generation({}, {})
    source = OpenedWeights(
        spec=spec,
        config=None if config is None else loaded,
        tokenizer=found,
        no_tokenizer=reason,
        where=foreign.where,
        reader=open_reader(foreign, table_of(foreign, spec.model_cls), spec),
        generation=generation,
        identity=" ".join(map(_sample, foreign.files())),
    )
    return source, loaded


def _describe(source: ForeignSource, name: str | None, flavor: str | None) -> tuple[ModelSpec, Config]:
    """Return the model that weights describe, or a flavor, and a config with it and the tokenizer beside the weights.

    Raises:
        UserError: the weights do not describe their model.
    """
    name = name or source.family()
    if name is None:
        raise UserError(f"{source.where} does not describe its model: name it (--model, --config)")
    model_cls = resolve_model(name, flavor, {}).model_cls
    table_of(source, model_cls)
    if flavor is not None:
        spec = ModelSpec(model_cls, model_cls.flavors[flavor])
    elif (described := source.read_args(model_cls)) is None:
        raise UserError(f"{source.where} does not describe its model: name it (--flavor, --config)")
    else:
        try:
            resolve_model(name, None, described)  # it checks the type of each value
            spec = ModelSpec(model_cls, type(next(iter(model_cls.flavors.values())))(**described))
        except (ValueError, TypeError) as error:  # the values fit no model
            raise UserError(f"{source.where}: {error}") from None
    args = vars(spec.args)
    flavor = flavor or find_flavor(model_cls, args)
    base = model_cls.flavors[flavor] if flavor else next(iter(model_cls.flavors.values()))
    changed = {key: value for key, value in args.items() if value != getattr(base, key) or key == "vocab_size"}
    tokenizer = source.tokenizer()
    data = Data(tokenizer=str(tokenizer.absolute())) if tokenizer else Data()
    return spec, Config(model=ModelSelection(name=name, flavor=flavor, args=changed), data=data)


def _sample(file: Path) -> str:
    """Return the name and size of a file, and the checksum of parts of it that add up to a few MiB."""
    size, checksum = file.stat().st_size, 0
    with file.open("rb") as stream:
        for part in range(SAMPLES):
            stream.seek(part * max(size - SAMPLE, 0) // (SAMPLES - 1))
            checksum = zlib.crc32(stream.read(SAMPLE), checksum)
    return f"{file.name} {size} {checksum:08x}"


def open_model(path: str, config: str | None, section: str) -> ModelWeights:
    """Open the weights that a section of a config names, as its `path` and `config`; see `open_source`."""
    try:
        source = open_source(path, config=config)
        if source.config and source.config.model.path:
            check_decoder(source.spec)
        return ModelWeights(source.spec, source.tokenizer, source.where, source.identity, source.reader)
    except UserError as error:
        raise UserError(
            re.sub(r"(--model, )?(--flavor, )?(--model-file or )?--config", f"{section}.config", str(error))
        ) from None


def load_model(
    source: OpenedWeights, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> Model:
    """Return the model with its weights, in this process alone. Memory peaks at the model and one tensor.

    Raises:
        UserError: the checkpoint has other tensors than the model, or is damaged.
    """
    if source.config and source.config.model.path:
        check_decoder(source.spec)
    model = source.spec.build()
    set_dtype(model, dtype)
    device = torch.device(device)
    allocate(model, device, device)
    load_tensors(source.reader, stored_tensors(source.reader, model_state(model), where=source.where))
    use_kernels(model, pick_kernels(device), device)
    return model.eval()


def read_tensor(source: OpenedWeights, name: str) -> Tensor:
    """Return one tensor of the model, on the CPU.

    Args:
        name: fully qualified, in the model.

    Raises:
        KeyError: there is no such tensor.
        UserError: it is damaged.
    """
    return read_whole(source.reader, name)


def _read_config(
    storage: Storage, folder: str, manifest: Manifest, given: str | Path | None, model_file: str | None
) -> tuple[Config, dict[str, str]]:
    """Return the config of the run, and what was left out of it because it may be of others.

    The config is the given one, the checkpoint's own, or that of the run's folder.
    """
    where = storage.url_of(folder)
    if given is not None:
        config = load(given)
        model = config.model.model_copy(update={"file": model_file or config.model.file})
        return config.model_copy(update={"model": model}), {}
    beside = Path(storage.url).parent / manifests.CONFIG
    if manifests.CONFIG in manifest.files:
        text = manifests.read_checked(storage, folder, manifests.CONFIG, manifest)
    elif "://" not in storage.url and beside.is_file():
        text = read_small(file_inside(beside.parent, manifests.CONFIG))
    else:
        raise UserError(f"{where} was saved without its config: name that of the run, with --config")
    try:
        draft, refused = read_foreign(text, model_file=model_file)
    except UserError as error:
        raise UnsafeCheckpoint(f"{where}: {error}") from None
    wrong = [problem for problem in draft.problems if not problem.key or problem.key.startswith("model")]
    if wrong:  # the other options do not matter here
        lines = "\n".join(map(str, wrong))
        raise UserError(f"the config of {where} cannot be read:\n{lines}\nName one of the same model, with --config")
    return draft.config, refused


def _load_tokenizer(name: str, *, must_exist: bool) -> tuple[Tokenizer | None, str]:
    """Return a tokenizer; if it cannot be loaded, None and the reason, which a command reports when it needs one."""
    try:
        return load_tokenizer(name), ""
    except UserError as error:
        if must_exist:
            raise UserError(str(error).replace("data.tokenizer", "--tokenizer", 1)) from None
        return None, str(error).removeprefix("data.tokenizer: ")


def _own_tokenizer(storage: Storage, named: str, path: str) -> tuple[Tokenizer | None, str]:
    """Return the tokenizer of a checkpoint, as `_load_tokenizer`. A path is not followed: the copy is read.

    Args:
        path: what the user names: the folder of a run has the copy, wherever its checkpoints are.
    """
    if is_shipped(named):
        return _load_tokenizer(named, must_exist=False)
    places = [] if "://" in storage.url else [Path(storage.url).absolute()]
    places += [place.parent for place in places if place.name == "checkpoints"]
    run = Path(path).absolute()
    if "://" not in path and manifests.step_of(run.name) is None and (run / manifests.CONFIG).is_file():
        places.append(run)
    try:
        return _load_tokenizer(str(find_copy(places, named)), must_exist=False)
    except UserError as error:
        return None, str(error)


def _as_trained(spec: ModelSpec, manifest: Manifest, stored: Metadata) -> ModelSpec:
    """Return the model for the length of the training's sequences, if it has a parameter for each position."""
    seq_len = manifest.settings.get("training.seq_len", spec.args.max_seq_len)  # imported weights have no such setting
    trained = spec._replace(args=replace(spec.args, max_seq_len=seq_len))

    def fits(one: ModelSpec) -> bool:
        named = {f"model.{name}": tensor for name, tensor in model_state(one.build()).items()}
        return not difference(named, stored, ["model"])

    return trained if not fits(spec) and fits(trained) else spec


def _model_of(selection: ModelSelection, manifest: Manifest, tokenizer: Tokenizer | None, where: str) -> ModelSpec:
    """Return the model with the shape that the manifest states, whatever a flavor or a tokenizer is today."""
    saved = {
        name.removeprefix("model.args."): value
        for name, value in manifest.settings.items()
        if name.startswith("model.args.") and isinstance(value, bool | int | float | str)
    }
    size = tokenizer.vocab_size if tokenizer else None
    try:
        args = {**selection.args, **saved}
        name, flavor, file = selection.name, selection.flavor, selection.file
        return resolve_model(name, flavor, args, file, path=selection.path, tokenizer_size=size)
    except ConfigError as error:
        raise UserError(
            f"the model of {where} is unknown here:\n{error}\nName a config with it, with --config"
        ) from None


def note(line: str) -> None:
    """Print a line for people: on standard error, because standard output has results only."""
    print(line, file=sys.stderr, flush=True)


def tokenizer_of(source: OpenedWeights) -> Tokenizer:
    """Return the tokenizer of a source, with a warning if its size is not the one that the model was made for.

    Raises:
        UserError: the tokenizer is not there, or has more tokens than the model.
    """
    if source.tokenizer is None:
        reason = f": {source.no_tokenizer}; or" if source.no_tokenizer else " is not on this machine:"
        raise UserError(f"{source.where}: its tokenizer{reason} name one with --tokenizer")
    name, tokens, entries = source.tokenizer.name, source.tokenizer.vocab_size, source.spec.args.vocab_size
    if tokens > entries:
        raise UserError(
            f"the tokenizer {name} has {tokens:,} tokens, and the model of {source.where} only {entries:,}: name that "
            "of the training with --tokenizer"
        )
    if vocab_size_for(tokens, entries) != entries:
        note(
            f"warning: the tokenizer {name} has {tokens:,} tokens, and the model {entries:,}: is it that of the "
            "training?"
        )
    return source.tokenizer


def default_dtype(device: torch.device) -> str:
    """Return the dtype in which a device computes well."""
    return "float32" if device.type == "cpu" else "bfloat16"


class AverageReader(RankReader):
    """Reader of the model in a checkpoint, with the values that validation has measured. What has no average (buffers,
    frozen parameters) is as it is.

    Args:
        where: the checkpoint, for errors.

    Raises:
        UserError: there is no average.
    """

    def __init__(self, stored: ShardReader, where: str) -> None:
        self.stored = stored
        entries: dict[str, Any] = stored.metadata.state_dict_metadata
        updates = next((index for index in stored.chunks if index.fqn == f"{AVERAGE}.updates"), None)
        if updates is None:
            raise UserError(f"--average: {where} has no average of the weights: it was trained without [average]")
        if not (taken := int(stored.read_chunk(updates))):
            raise UserError(f"--average: {where} has an average of no weights yet: take a later checkpoint")
        self._parts: dict[str, list[str]] = {}
        """Tensors whose mean is the average of a parameter: the EMA, or the snapshots in the order of their numbers."""
        for name in entries:
            match = re.fullmatch(rf"{AVERAGE}\.(?:ema|snapshot_(\d+))\.(.+)", name)
            if match and int(match[1] or 0) < taken:
                self._parts.setdefault(f"model.{match[2]}", []).append(name)
        for names in self._parts.values():
            names.sort(key=lambda name: (len(name), name))  # snapshot_10 after snapshot_9
        self.metadata = Metadata(
            {
                name: replace(entry, chunks=entries[self._parts[name][0]].chunks) if name in self._parts else entry
                for name, entry in entries.items()
                if name.startswith("model.")
            }
        )

    def read_item(self, item: ReadItem) -> Tensor:
        parts = self._parts.get(item.storage_index.fqn, [item.storage_index.fqn])
        read = [
            self.stored.read_item(replace(item, storage_index=replace(item.storage_index, fqn=name))) for name in parts
        ]
        return read[0] if len(parts) == 1 else rounded_once(weighted_mean(read, [1.0] * len(read)), read[0].dtype)
