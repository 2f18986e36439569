"""`titanlite checkpoint merge`: a checkpoint whose weights are the mean of those of several, tensor by tensor."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from titanlite.checkpoint.resume import model_settings
from titanlite.ops.mean import rounded_once, weighted_mean
from titanlite.runtime.errors import UserError
from titanlite.schema import Config, dump
from titanlite.tools.arguments import ModelFile, RunConfig
from titanlite.tools.checkpoints.command import explaining_damage
from titanlite.tools.convert.import_weights import open_place, write_weights
from titanlite.tools.convert.source import OpenedWeights, open_source, read_tensor
from titanlite.tools.convert.weights import find_source


@explaining_damage()
def merge(
    paths: Sequence[str],
    *,
    out: str,
    weights: Sequence[float] = (),
    config: RunConfig | None = None,
    model_file: ModelFile | None = None,
) -> None:
    """Write the mean of the weights of several checkpoints as a checkpoint.

    Means are computed in float64 and rounded once, to the dtype of the weights. The checkpoint is of step 0 and has the
    model alone, for checkpoint.initial_load_path and for the commands that take a checkpoint. Adapters of [lora] are
    added to their weights first.

    Args:
        paths (CHECKPOINT): a checkpoint, the folder of a run (its newest complete one), or a URL of either
        out (DIR): folder or URL for the checkpoint, step-00000000
        weights (W): how much each checkpoint counts, in the same order; default: all count the same

    Raises:
        UserError: the checkpoints are of different models, the weights do not fit them, or the place is taken.
        RunError: the place cannot be written.

    Example:
        outputs/a outputs/b outputs/c --out outputs/mean
        outputs/debug/checkpoints/step-00000100 outputs/debug/checkpoints/step-00000140 --out outputs/mean --weights 1 3
    """
    weights = _checked(weights, len(paths))
    for path in paths:
        if find_source(path) is not None:
            raise UserError(
                f"{path} was written by another program: titanlite checkpoint import makes a checkpoint of it"
            )
    sources = [open_source(path, config=config, model_file=model_file) for path in paths]
    first, first_config = sources[0], _config_of(sources[0])
    _check_same(sources)
    entries = _tensors(first)

    def mean(name: str) -> Tensor:
        tensors = (read_tensor(source, name) for source in sources)
        return rounded_once(weighted_mean(tensors, weights), entries[name].properties.dtype)

    args = first.spec.args
    storage, folder = open_place(out)
    write_weights(
        storage,
        folder,
        {name: torch.empty((), dtype=entry.properties.dtype).expand(entry.size) for name, entry in entries.items()},
        read=mean,
        settings=model_settings(first_config.model.title, args) | {"training.seq_len": args.max_seq_len},
        config=dump(first_config),
        origin=first.origin,
        tokenizer=first.tokenizer.name if first.tokenizer else first_config.data.tokenizer,
    )
    print(f"wrote {storage.url_of(folder)}, the mean of {len(sources)} checkpoints")


def _checked(weights: Sequence[float], count: int) -> Sequence[float]:
    if count < 2:
        raise UserError("one checkpoint has no mean: name two or more")
    if weights and len(weights) != count:
        raise UserError(f"--weights: {len(weights)} numbers for {count} checkpoints")
    if weights and (not math.isfinite(sum(weights)) or sum(weights) == 0):
        raise UserError(f"--weights: their sum is {sum(weights):g}, and the mean divides by it")
    return weights or [1.0] * count


def _config_of(source: OpenedWeights) -> Config:
    assert source.config is not None, "it is a checkpoint of ours"
    return source.config


def _tensors(source: OpenedWeights) -> dict[str, TensorStorageMetadata]:
    """Return the tensors of the model in a source, by the model's names."""
    entries: dict[str, Any] = source.metadata.state_dict_metadata
    return {name.removeprefix("model."): entry for name, entry in entries.items() if name.startswith("model.")}


def _check_same(sources: Sequence[OpenedWeights]) -> None:
    """Check that all are of the same model.

    Raises:
        UserError: one line with the first difference.
    """
    ours: dict[str, Any] | None = None
    for source in sources:
        theirs = {name: f"{[*entry.size]} {entry.properties.dtype}" for name, entry in _tensors(source).items()}
        theirs |= model_settings(_config_of(source).model.title, source.spec.args)
        ours = theirs if ours is None else ours
        if name := next((name for name in ours | theirs if ours.get(name) != theirs.get(name)), None):
            first, other = (found.get(name, "missing") for found in (ours, theirs))
            raise UserError(
                f"{source.where} belongs to another model than {sources[0].where}: {name} is {other}, not {first}"
            )
