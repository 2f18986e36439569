"""`titanlite checkpoint import`: a checkpoint of ours, made of weights in another format, tensor by tensor.

Memory holds the largest tensor at most.
"""

import json
import os
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from titanlite.checkpoint import manifest as manifests
from titanlite.checkpoint.dcp_read import RankReader
from titanlite.checkpoint.dcp_write import ShardWriter, write_state
from titanlite.checkpoint.difference import Difference, difference, selected, to_globs
from titanlite.checkpoint.initial import of_further_token
from titanlite.checkpoint.manifest import Manifest, folder_name
from titanlite.checkpoint.resume import model_settings
from titanlite.checkpoint.vocabulary import VOCABULARY, ResizedReader, resized
from titanlite.data.tokenizer import COPY, copy_tokenizer, files_of, find_tokenizer, is_shipped
from titanlite.models.base import Model
from titanlite.runtime.console import progress_bar
from titanlite.runtime.errors import UserError
from titanlite.schema import dump
from titanlite.state import model_state
from titanlite.storage.storage import MANIFEST, Storage, open_storage
from titanlite.techniques import multi_token
from titanlite.tools.checkpoints.command import explaining_damage
from titanlite.tools.convert.reader import ForeignReader, read_whole
from titanlite.tools.convert.source import ORIGIN, open_foreign
from titanlite.tools.convert.weights import find_source

OWNER = "import"
"""Owner of what an import has not finished: the next import to the same place deletes it."""


@explaining_damage()
def import_weights(
    path: str,
    *,
    out: str,
    model: str | None = None,
    flavor: str | None = None,
    config: str | None = None,
    dtype: Literal["float32", "bfloat16", "float16"] | None = None,
    allow_unexpected: Sequence[str] = (),
) -> None:
    """Write weights of another program as a checkpoint.

    Reads a Hugging Face folder, or a step of torchtitan. The checkpoint is of step 0 and has the model alone, for
    checkpoint.initial_load_path and for the commands that take a checkpoint. Training needs no import:
    checkpoint.initial_load_path takes the same folders.

    Args:
        path (DIR_OR_FILE): weights of another program
        out (DIR): folder or URL for the checkpoint, step-00000000
        model (NAME): model family; default: what the weights describe
        flavor (NAME): flavor of the family; default: what the weights describe
        config: config with the model, instead of --model and --flavor
        dtype: dtype of the weights; default: as they are, and bfloat16 for quantized ones
        allow_unexpected (GLOB): leave out tensors that the model does not have

    Raises:
        UserError: the weights are of another model, damaged or not safe to load, or the place is taken.
        RunError: the place cannot be written.

    Example:
        models/Qwen3-0.6B --out outputs/qwen3
        torchtitan/outputs/checkpoint/step-1000 --model llama3 --flavor 8B --out outputs/llama3
    """
    if config is not None and (model or flavor):
        raise UserError("--config names the model: leave out --model and --flavor")
    if (foreign := find_source(path)) is None:
        raise UserError(f"{path} holds no weights of another program. titanlite reads its own checkpoints as they are")
    source, loaded = open_foreign(foreign, model=model, flavor=flavor, config=config)
    reader, spec = source.reader, source.spec
    assert isinstance(reader, ForeignReader)
    if dtype is not None:
        reader.set_dtype(getattr(torch, dtype))
    built = spec.build()
    if loaded.training.multi_token_weight:
        multi_token.TECHNIQUE.choose_trained(built, loaded)
    kept = _initial_buffers(built, {name.removeprefix("model.") for name in reader.kept})
    tensors = {name: tensor for name, tensor in model_state(built).items() if name not in kept}
    named = {f"model.{name}": tensor for name, tensor in tensors.items()}
    rows = dict.fromkeys(resized(named, reader.metadata, spec.args.vocab_size), spec.args.vocab_size)
    may_differ = selected(VOCABULARY, loaded.checkpoint.allow_changes)
    weights = ResizedReader(reader, rows) if may_differ else reader
    _check(named, weights, allow_unexpected, rows if not may_differ else {})
    entries: dict[str, Any] = weights.metadata.state_dict_metadata

    state = {  # each tensor is a view of one element, and the writer reads its values when it writes it
        name: torch.empty((), dtype=entries[f"model.{name}"].properties.dtype).expand(tensor.shape)
        for name, tensor in tensors.items()
    } | kept
    storage, folder = open_place(out)
    write_weights(
        storage,
        folder,
        state,
        read=lambda name: kept[name] if name in kept else read_whole(weights, name),
        settings=model_settings(loaded.model.title, spec.args),
        config=dump(loaded),
        origin=source.origin,
        tokenizer=loaded.data.tokenizer,
    )
    print(f"wrote {storage.url_of(folder)}, the weights of {path}")


def _check(
    named: Mapping[str, Tensor], reader: RankReader, allow_unexpected: Sequence[str], other_rows: Mapping[str, int]
) -> None:
    """Check that the source has these tensors and no others. A `FurtherToken` that is not among them is left out.

    Args:
        other_rows: tensors of which only the number of tokens differs.
    """
    found = difference(dict(named), reader.metadata, ["*"])
    further = of_further_token(found)
    found = found.without(unexpected=further)
    unexpected = {**found.unexpected, **reader.unknown}
    unexpected = {name: text for name, text in unexpected.items() if name not in found.missing}
    wrong = Difference(found.missing, unexpected).without(unexpected=allow_unexpected)
    if wrong:
        globs = " ".join(f"--allow-unexpected '{glob}'" for glob in to_globs(wrong.unexpected))
        advice = f"\nTo leave out what is unexpected: {globs}" if globs and not wrong.missing else ""
        if other_rows and not wrong.missing.keys() - other_rows.keys():
            accepted = f'checkpoint.allow_changes = ["{VOCABULARY}"]'
            advice += f"\nTo keep the rows of the tokens that are there, set {accepted} in a --config"
        raise UserError(f"{reader.where} does not fit the model:\n{wrong}{advice}")
    if further:
        kept_by = "a --config with training.multi_token_weight above 0 keeps it"
        print(f"left out: the module that predicts the token after the next ({kept_by})")


def open_place(out: str) -> tuple[Storage, str]:
    """Return the storage and the folder of the checkpoint in it.

    Raises:
        UserError: the place is not a folder, holds checkpoints, or is in the folder of a run, which is never written.
    """
    if "://" not in out:
        place = Path(out).expanduser()
        if os.path.lexists(place) and not place.is_dir():
            raise UserError(f"--out: {out} is not a folder")
        place = place.resolve()
        signs = place / "checkpoints", *(folder / "run.json" for folder in (place, *place.parents))
        if run := next((sign.parent for sign in signs if sign.exists()), None):
            raise UserError(f"--out: {run} is the folder of a run, which has its own checkpoints: name another folder")
    try:
        storage = open_storage(out, owner=OWNER)
        listing = storage.list()
    except (ValueError, ImportError) as error:  # fsspec does not know the scheme, or lacks its package
        raise UserError(f"--out: {error}") from None
    if taken := [name for name, files in listing.items() if manifests.step_of(name) is not None and MANIFEST in files]:
        raise UserError(f"--out: {storage.url_of(taken[0])} is there already: name another folder")
    return storage, folder_name(0)


def _initial_buffers(model: Model, names: set[str]) -> dict[str, Tensor]:
    """Return the first values of buffers that no other program has."""
    if not names:
        return {}
    with torch.device("cpu"):
        model.init_buffers()
    return {name: tensor for name, tensor in model_state(model).items() if name in names}


def write_weights(
    storage: Storage,
    folder: str,
    state: dict[str, Tensor],
    *,
    read: Callable[[str], Tensor],
    settings: dict[str, Any],
    config: str,
    origin: dict[str, Any] | None,
    tokenizer: str,
) -> None:
    """Write and commit a checkpoint of step 0 with a model alone; after an error nothing is left of it.

    Args:
        state: tensors of the shapes and dtypes to write, of which `read` gives the values when they are written.
        settings: see `model_settings`.
        config: TOML with the model and the tokenizer.
        origin: see `OpenedWeights.origin`.
        tokenizer: name or path of the tokenizer. One that is not shipped is copied beside the checkpoint.
    """
    started = time.perf_counter()
    with progress_bar(folder, sum(tensor.nbytes for tensor in state.values())) as advance:

        def read_and_show(name: str) -> Tensor:
            tensor = read(name.removeprefix("model."))
            advance(tensor.nbytes)
            return tensor

        try:
            writer = ShardWriter(storage, storage.begin(folder), 0, read_and_show)
            write_state({"model": state}, writer)
            if origin is not None:
                writer.write_file(ORIGIN, json.dumps(origin).encode())
            if not is_shipped(tokenizer) and "://" not in storage.url:
                with suppress(UserError):  # without a readable tokenizer, commands need --tokenizer
                    if path := find_tokenizer(tokenizer):
                        copy_tokenizer(files_of(path), Path(storage.url, COPY))
            draft = Manifest(
                step=0,
                samples=0,
                run_id=uuid.uuid4().hex,
                settings=settings,
                mesh={"replicate": 1, "shard": 1},
            )
            manifest = writer.complete(draft, config, started=started)
            writer.check_sizes(manifest)
            storage.publish(folder, manifest.to_json())
        except BaseException:
            with suppress(Exception):
                storage.discard(folder)
            raise
