"""Foreign weights for a model: find the format, compare its arguments with the model's, and open a reader."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from titanlite.checkpoint.difference import selected
from titanlite.models.base import Model, unique_parameters
from titanlite.models.decoder import Decoder
from titanlite.models.formats import Table
from titanlite.models.registry import ModelSpec
from titanlite.runtime.errors import UserError
from titanlite.state import model_state
from titanlite.tools.convert.hugging_face import HuggingFaceFolder
from titanlite.tools.convert.reader import ForeignReader, ForeignSource
from titanlite.tools.convert.torchtitan import TorchtitanFolder

KNOWN = """a checkpoint of titanlite (step-00000100, or the folder of a run), a Hugging Face folder (config.json and \
*.safetensors), or a step of torchtitan or of others by DCP (.metadata)"""


TIED_OPTIONS = "tied_head", "tie_word_embeddings"
"""Arguments of our models, and of those of transformers, that give the head the weight of the embedding."""


def find_source(path: str) -> ForeignSource | None:
    """Return the weights at a path if they are of another format; None if they may be a checkpoint of ours.

    Raises:
        UserError: there is nothing.
    """
    if "://" in path:
        return None
    place = Path(path).expanduser()
    if not place.exists():
        raise UserError(f"no file or folder {place}")
    if place.suffix == ".pth" or any(place.glob("consolidated.*.pth")):
        raise UserError(f"{place} is in Meta's form, which is not read: take the same weights from Hugging Face")
    adapters = (place if place.is_dir() else place.parent) / "adapter_config.json"
    if adapters.is_file() and (place.is_dir() or place.name.startswith("adapter_model.")):
        raise UserError(
            f"{place} has adapters of PEFT, and no whole model: merge them first, as by "
            "PeftModel.from_pretrained(base, adapters).merge_and_unload().save_pretrained(folder)"
        )
    for source in (TorchtitanFolder, HuggingFaceFolder):
        if source.matches(place):
            return source(place)
    if place.is_file():
        raise UserError(f"{place} is none of: {KNOWN}")
    return None


def open_weights(path: str, spec: ModelSpec, allow_changes: Sequence[str]) -> ForeignReader | None:
    """Open foreign weights for a model; return None if the path may be a checkpoint of ours.

    Args:
        allow_changes: globs of arguments, such as model.args.rope_theta, that may differ from those of the source.

    Raises:
        UserError: the weights are of another model, damaged, or not safe to load.
    """
    source = find_source(path)
    if source is None:
        return None
    table = table_of(source, spec.model_cls)
    args = source.read_args(spec.model_cls)
    if args is not None:
        check_args(source.where, args, spec, allow_changes)
    return open_reader(source, table, spec)


def table_of(source: ForeignSource, model_cls: type[Model]) -> Table:
    """Return the names of the source's format.

    Raises:
        UserError: the model family has none.
    """
    table = source.table(model_cls.formats)
    if table is None:
        raise UserError(
            f"{source.where}: {model_cls.__name__} has no table of names for this format (docs/add_a_model.md)"
        )
    return table


def open_reader(source: ForeignSource, table: Table, spec: ModelSpec) -> ForeignReader:
    """Open weights for a model whose arguments have been checked.

    Raises:
        UserError: it has a head of its own, and the model has none.
    """
    model, table = with_further(spec, table)
    table = table.with_renaming(model.renaming())
    ours = model_state(model)
    reader = ForeignReader(
        source.where,
        source.tensors(table, _foreign_shapes(table, {name: tuple(tensor.shape) for name, tensor in ours.items()})),
        table,
        head_size=getattr(spec.args, "head_size", None),
        model_names=ours,
    )
    names = {parameter: name for name, parameter in unique_parameters(model)}
    for other, parameter in model.named_parameters(remove_duplicate=False):
        if (name := names[parameter]) != other:
            _keep_one(reader, f"model.{name}", f"model.{other}", spec)
    return reader


def _keep_one(reader: ForeignReader, name: str, other: str, spec: ModelSpec) -> None:
    """Keep one of two tensors that are the same in our model. Files may have both, or either of them."""
    if reader.shape(other) is None:
        return
    if reader.shape(name) is None:
        reader.rename(other, name)
        return
    if reader.shape(name) == reader.shape(other) and not reader.first_rows(name, 8).equal(reader.first_rows(other, 8)):
        option = next(option for option in TIED_OPTIONS if hasattr(spec.args, option))
        raise UserError(f"{reader.where} has a head of its own: set model.args.{option} = false")
    reader.drop(other)


def with_further(spec: ModelSpec, table: Table) -> tuple[Model, Table]:
    """Return the model with a `FurtherToken`, on the meta device, and the table; without it if the table lacks it."""
    model = spec.build()
    if not table.further or not isinstance(model, Decoder):
        return model, table
    model.predict_further(1.0)
    return model, table.with_further(spec.args)


def check_args(where: str, found: Mapping[str, Any], spec: ModelSpec, allow_changes: Sequence[str]) -> None:
    """Compare a source's arguments with those of the model. max_seq_len may differ: it is no part of the weights.

    Raises:
        UserError: lists every other argument that differs, and what to set.
    """
    ours = asdict(spec.args)
    changed = [
        name
        for name, value in found.items()
        if name != "max_seq_len" and ours.get(name) != value and not selected(f"model.args.{name}", allow_changes)
    ]
    if not changed:
        return
    lines = [f"  {name} = {_toml(found[name])}, here {_toml(ours.get(name))}" for name in changed]
    flavor = find_flavor(spec.model_cls, found)
    paste = [f'  flavor = "{flavor}"'] if flavor else [f"  {name} = {_toml(found[name])}" for name in changed]
    keys = ", ".join(f'"model.args.{name}"' for name in changed)
    raise UserError(
        "\n".join(
            [
                f"{where} belongs to another model:",
                *lines,
                f"Set in [{'model' if flavor else 'model.args'}]:",
                *paste,
                f"or accept the difference: checkpoint.allow_changes = [{keys}]",
            ]
        )
    )


def find_flavor(model_cls: type[Model], args: Mapping[str, Any]) -> str | None:
    """Return the flavor with these arguments; None if there is none."""
    wanted = {name: value for name, value in args.items() if name != "max_seq_len"}
    for name, flavor in model_cls.flavors.items():
        if asdict(flavor) == asdict(replace(flavor, **wanted)):
            return name
    return None


def _toml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value)


def _foreign_shapes(table: Table, ours: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of our tensors in the other format; those of one expert where each has a tensor of its own."""
    shapes = {}
    for name, shape in ours.items():
        if found := table.find(name):
            entry, theirs = found
            own = entry.shape_there(shape)
            shapes[theirs] = own[1:] if "{expert}" in theirs else own
    return shapes
