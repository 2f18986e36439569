"""`titanlite checkpoint import`: a checkpoint of ours, made of weights in another format, tensor by tensor.

At no time is there more in memory than the largest tensor.
"""

import hashlib
import json
import time
import uuid
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from rich.progress import Progress
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException

import titanlite
from titanlite.checkpoint import manifest as manifests
from titanlite.checkpoint.dcp_write import ShardWriter, checksums_json
from titanlite.checkpoint.load import model_settings
from titanlite.checkpoint.manifest import Manifest, folder_name
from titanlite.checkpoint.state import Difference, difference, model_state, to_globs
from titanlite.data.tokenizer import COPY, copy_tokenizer, files_of, find_tokenizer, is_shipped
from titanlite.models.registry import ModelSpec
from titanlite.runtime.console import progress_console
from titanlite.runtime.errors import UserError
from titanlite.runtime.ranks import error_of_ranks
from titanlite.schema import Config, Data, dump
from titanlite.storage.storage import MANIFEST, Storage, open_storage
from titanlite.tools.convert.compress import Student, choose_layers
from titanlite.tools.convert.describe import resolve_source
from titanlite.tools.convert.reader import ForeignReader
from titanlite.tools.convert.source import ORIGIN, Source, open_source, origin_of, read_tensor
from titanlite.tools.convert.weights import ForeignSource, find_source, open_reader, table_of

OWNER = "import"  # the next import to a place sweeps what a killed one left there


class Teacher(NamedTuple):
    """Weights to import from, by the names of their model."""

    spec: ModelSpec
    config: Config
    tokenizer: str | None
    """Name under which its tokenizer is loaded. None: there is none."""
    kept: set[str]
    """Tensors that the source does not have: they keep their initial values."""
    read: Callable[[str], Tensor]
    dtype: Callable[[str], torch.dtype]
    origin: dict[str, Any] | None = None
    """What to keep of another program's weights; see `source.origin_of`."""

    def read_or_initial(self, name: str) -> Tensor:
        """Return a tensor by its name in the model; its initial value if the source does not have it."""
        whole = f"model.{name}"
        return _initial_buffers(self.spec, {whole})[whole] if whole in self.kept else self.read(whole)


ChooseExperts = Callable[[Teacher], dict[str, list[int]]]
"""Returns the experts to take, for each name of a tensor with one entry an expert."""


def import_weights(
    path: str,
    *,
    out: str,
    model: str | None,
    flavor: str | None,
    config: str | None,
    dtype: torch.dtype | None,
    allow_unexpected: Sequence[str],
    layers: str | None = None,
    choose_experts: ChooseExperts | None = None,
) -> str:
    """Write weights of another format as a checkpoint of step 0, and return its place.

    Args:
        out: folder or URL for the checkpoint's folder, step-00000000.
        model: name of the family; None takes what the weights describe.
        config: config with the model, instead of name and flavor.
        dtype: of parameters; None keeps that of the weights.
        allow_unexpected: globs of tensors to leave out.
        layers: numbers of the layers to take, such as "0,2,4-7"; None takes all.
        choose_experts: returns the experts to take; None takes all. With one of the two, path may be a checkpoint of
            ours, too.

    Raises:
        UserError: the weights are of another model, damaged or not safe to load, or the place is taken.
        OSError: the place cannot be written.
    """
    compresses = layers is not None or choose_experts is not None
    teacher = _open(path, model, flavor, config, allow_unexpected, ours_too=compresses)
    storage, folder = _open_place(out)
    student = Student(
        None if layers is None else choose_layers(layers, teacher.spec),
        choose_experts and choose_experts(teacher),
    )
    spec, resolved = student.spec(teacher.spec), teacher.config
    if compresses:  # the run's other options are not the student's
        data = Data(tokenizer=resolved.data.tokenizer)
        resolved = Config(model=student.model(resolved.model), data=data)
    tensors = {f"model.{name}": tensor for name, tensor in model_state(spec.build()).items()}
    theirs = {name: student.teacher_name(name) for name in tensors}
    kept = _initial_buffers(spec, {name for name in tensors if theirs[name] in teacher.kept})

    def read(name: str) -> Tensor:
        if name in kept:
            return kept[name]
        return student.part_of(theirs[name], teacher.read(theirs[name])).to(dtype_of(name)).contiguous()

    def dtype_of(name: str) -> torch.dtype:
        return kept[name].dtype if name in kept else dtype or teacher.dtype(theirs[name])

    state = {  # views of one element: the writer asks for each tensor when it writes it
        name.removeprefix("model."): torch.empty((), dtype=dtype_of(name)).expand(tensor.shape)
        for name, tensor in tensors.items()
    }
    settings = model_settings(resolved.model.title, spec.args)
    _write(
        storage,
        folder,
        state,
        read=read,
        settings=settings,
        config=dump(resolved),
        origin=teacher.origin,
        tokenizer=teacher.tokenizer,
    )
    return storage.url_of(folder)


def _open(
    path: str,
    model: str | None,
    flavor: str | None,
    config: str | None,
    allow_unexpected: Sequence[str],
    *,
    ours_too: bool,
) -> Teacher:
    if (source := find_source(path)) is not None:
        return _foreign(source, model, flavor, config, allow_unexpected)
    if not ours_too:
        raise UserError(f"{path} holds no weights of another program. titanlite reads its own checkpoints as they are")
    if model or flavor:
        raise UserError("--model, --flavor: a checkpoint of titanlite names its model: leave them out")
    return _of_ours(open_source(path, config=config))


def _foreign(
    source: ForeignSource, model: str | None, flavor: str | None, config: str | None, allow_unexpected: Sequence[str]
) -> Teacher:
    spec, resolved = resolve_source(source, model=model, flavor=flavor, config=config)
    table = table_of(source, spec.model_cls)
    reader = open_reader(source, table, spec, is_described=source.read_args(spec.model_cls) is not None)
    tensors = {f"model.{name}": tensor for name, tensor in model_state(spec.build()).items()}
    _check(reader, {name: it for name, it in tensors.items() if name not in reader.kept}, allow_unexpected)
    return Teacher(
        spec,
        resolved,
        resolved.data.tokenizer,
        reader.kept,
        reader.read,
        reader.dtype,
        origin_of(source) | ({} if config is None else {"has_tokenizer": True}),
    )


def _of_ours(source: Source) -> Teacher:
    assert source.config is not None, "checkpoints of ours have one"
    entries: dict[str, Any] = source.metadata.state_dict_metadata
    named = source.config.data.tokenizer
    return Teacher(
        source.spec,
        source.config,
        source.tokenizer.name if source.tokenizer else named if is_shipped(named) else None,
        set(),
        lambda name: read_tensor(source, name.removeprefix("model.")),
        lambda name: entries[name].properties.dtype,
    )


def _check(reader: ForeignReader, tensors: dict[str, Tensor], allow_unexpected: Sequence[str]) -> None:
    found = difference(tensors, reader.metadata, ["*"])
    unexpected = {name: text for name, text in (found.unexpected | reader.unknown).items() if name not in found.missing}
    wrong = Difference(found.missing, unexpected).without(unexpected=allow_unexpected)
    if wrong:
        globs = " ".join(f"--allow-unexpected '{glob}'" for glob in to_globs(wrong.unexpected))
        advice = f"\nTo leave out what is unexpected: {globs}" if globs and not wrong.missing else ""
        raise UserError(f"{reader.where} does not fit the model:\n{wrong}{advice}")


def _open_place(out: str) -> tuple[Storage, str]:
    """Return the storage and the folder of the checkpoint in it.

    Raises:
        UserError: the place is not a folder, or holds checkpoints.
    """
    above, _, last = out.rstrip("/").rpartition("/")
    step = manifests.step_of(last)
    if step:
        raise UserError(f"--out: {last} is of another step, and imported weights are of step 0: name a folder")
    place = (above or ".") if step == 0 else out
    if "://" not in place and Path(place).expanduser().exists() and not Path(place).expanduser().is_dir():
        raise UserError(f"--out: {place} is not a folder")
    try:
        storage = open_storage(place, owner=OWNER)
        listing = storage.list()
    except (ValueError, ImportError) as error:  # of fsspec
        raise UserError(f"--out: {error}") from None
    if taken := [name for name, files in listing.items() if manifests.step_of(name) is not None and MANIFEST in files]:
        raise UserError(f"--out: {storage.url_of(taken[0])} is there already: name another folder")
    return storage, folder_name(0)


def _initial_buffers(spec: ModelSpec, names: set[str]) -> dict[str, Tensor]:
    """Return the first values of buffers that no other program has."""
    if not names:
        return {}
    model = spec.build()
    with torch.device("cpu"):
        model.init_buffers()
    return {f"model.{name}": tensor for name, tensor in model_state(model).items() if f"model.{name}" in names}


def _write(
    storage: Storage,
    folder: str,
    state: dict[str, Tensor],
    *,
    read: Callable[[str], Tensor],
    settings: dict[str, Any],
    config: str,
    origin: dict[str, Any] | None,
    tokenizer: str | None,
) -> None:
    """Write and commit a checkpoint of a model alone; after an error nothing is left of it."""
    started = time.perf_counter()
    with Progress(console=progress_console(), transient=True) as progress:
        task = progress.add_task(folder, total=sum(tensor.nbytes for tensor in state.values()))

        def read_and_show(item: Any) -> Tensor:
            tensor = read(item.index.fqn)
            progress.advance(task, tensor.nbytes)
            return tensor

        try:
            staging = storage.begin(folder)
            writer = ShardWriter(storage, staging, rank=0, read=read_and_show)
            _save(state, writer)
            writer.write_file(manifests.CHECKSUMS, checksums_json(writer.written))
            writer.write_file(manifests.CONFIG, config.encode())
            if origin is not None:
                writer.write_file(ORIGIN, json.dumps(origin).encode())
            manifest = Manifest(
                step=0,
                samples=0,
                run_id=uuid.uuid4().hex,
                settings=settings,
                config_hash=hashlib.sha256(config.encode()).hexdigest(),
                mesh={"replicate": 1, "shard": 1},
                versions={"titanlite": titanlite.__version__, "torch": torch.__version__},
                saved_at=time.time(),
                elapsed_seconds=time.perf_counter() - started,
                load_step=None,
                files={name: file.record() for name, file in sorted(writer.written.items())},
            )
            if tokenizer and not is_shipped(tokenizer) and "://" not in storage.url:
                with suppress(UserError):  # what cannot be read here needs --tokenizer
                    if path := find_tokenizer(tokenizer):
                        copy_tokenizer(files_of(path), Path(storage.url, COPY))
            storage.publish(folder, manifest.to_json())
        except BaseException:
            with suppress(Exception):
                storage.discard(folder)
            raise


def _save(state: dict[str, Tensor], writer: ShardWriter) -> None:
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.save({"model": state}, storage_writer=writer, no_dist=True)
    except CheckpointException as error:
        raise error_of_ranks(error) from None
