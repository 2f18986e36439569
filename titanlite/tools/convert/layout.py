"""Tensors of a model in another format: their names, shapes and dtypes there, and their values."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from titanlite.checkpoint.difference import selected, to_globs
from titanlite.checkpoint.initial import stored_tensors
from titanlite.models.formats import Entry, Made, Renaming, Table
from titanlite.runtime.errors import UserError
from titanlite.state import model_state
from titanlite.tools.convert.source import OpenedWeights, read_tensor
from titanlite.tools.convert.weights import with_further


@dataclass(frozen=True)
class ExportTensor:
    """One tensor of the other format, and what it is made of."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    ours: str
    """Name of the model's tensor that it comes from."""
    entry: Entry
    expert: int | None = None
    """Number of the expert, where each has a tensor of its own."""
    other: str | None = None
    """Name of the model's tensor that has the other columns, where two share one."""
    made: Made | None = None
    """How it is made of the tensors of the format's table, where files have others."""
    parts: tuple["ExportTensor", ...] = ()
    """Those tensors; also the one that is only renamed."""

    @property
    def bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def export_tensors(
    source: OpenedWeights, table: Table, *, dtype: torch.dtype | None, drop: Sequence[str]
) -> list[ExportTensor]:
    """Return the tensors of the other format, in the order of the model.

    Args:
        dtype: of floating point tensors, but for entries that keep theirs; None keeps the stored dtypes.
        drop: globs of tensors to leave out for which the format has no place.

    Raises:
        UserError: the checkpoint belongs to another model, the format cannot hold a tensor that is not zero, or
            `drop` has one that the format has a place for: config.json describes a model with it.
    """
    built = source.spec.build()
    if any(name.endswith(".next_norm.weight") for name in source.metadata.state_dict_metadata):
        built, table = with_further(source.spec, table)
    model = stored_tensors(source.reader, model_state(built), where=source.where)
    if needed := to_globs(name for name in model if selected(name, drop) and table.find(name)):
        some = ", ".join([*needed[:3], *(["..."] if len(needed) > 3 else [])])
        raise UserError(
            f"--drop: config.json describes a model with {some}: only tensors that the format has no place for can be "
            "left out"
        )
    found: dict[str, ExportTensor] = {}
    for name, tensor in model.items():
        if (known := table.find(name)) is None:
            if not selected(name, drop):
                _check_zero(source, name)
            continue
        entry, theirs = known
        shape = tuple(tensor.shape)
        stored = source.metadata.state_dict_metadata[f"model.{name}"].properties.dtype  # pyright: ignore
        kept = dtype if dtype and stored.is_floating_point and not entry.keeps_dtype else stored
        own = entry.shape_there(shape)
        if entry.column == 1:  # the tensor with the first columns has been found before
            found[theirs] = replace(found[theirs], other=name)
            continue
        if "{expert}" not in theirs:
            found[theirs] = ExportTensor(theirs, own, kept, name, entry)
            copies = [entry for entry in table.entries if entry.is_copy and entry.ours == name]
            found |= {copy.theirs: ExportTensor(copy.theirs, own, kept, name, copy) for copy in copies}
            continue
        for expert in range(shape[0]):
            key = theirs.replace("{expert}", str(expert))
            found[key] = ExportTensor(key, own[1:], kept, name, entry, expert)
    renaming = built.renaming()
    return _of_files(found, renaming) if renaming else [*found.values()]


def _of_files(tensors: Mapping[str, ExportTensor], renaming: Renaming) -> list[ExportTensor]:
    """Return the tensors of files, for those of a table."""
    found = []
    metas = {name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for name, tensor in tensors.items()}
    for made in renaming.write(metas):
        parts = tuple(tensors[name] for kind in made.sources for name in kind)
        for name, tensor in made.tensors.items():
            if made.convert is None:
                found.append(replace(parts[0], name=name, parts=parts))
            else:
                first = replace(parts[0], name=name, shape=tuple(tensor.shape), dtype=tensor.dtype)
                found.append(replace(first, made=made, parts=parts))
    return found


def _check_zero(source: OpenedWeights, name: str) -> None:
    if read_tensor(source, name).any():
        raise UserError(
            f"{name} has no place in this format, and is not zero: the exported model would compute something else. "
            f"To leave it out all the same: --drop '{to_globs([name])[0]}'"
        )


def values_of(source: OpenedWeights) -> Callable[[ExportTensor], Tensor]:
    """Return a function that reads a tensor in the other layout, contiguous. One tensor of the model is kept in memory,
    and what files have in its place, because a stack of experts is asked for expert by expert."""
    head_size = getattr(source.spec.args, "head_size", None)
    kept: dict[str, Tensor] = {}
    of_files: dict[str, Tensor] = {}

    def values(tensor: ExportTensor) -> Tensor:
        if tensor.made is not None:
            if tensor.name not in of_files:
                assert tensor.made.convert is not None
                of_files.clear()
                of_files.update(tensor.made.convert({part.name: values(part) for part in tensor.parts}))
            return of_files[tensor.name].clone()  # safetensors refuses shared memory
        if tensor.ours not in kept:
            kept.clear()
            kept[tensor.ours] = read_tensor(source, tensor.ours)
        found = kept[tensor.ours]
        if tensor.expert is not None:
            found = found[tensor.expert]
        if tensor.entry.interleaved:
            assert head_size is not None
            found = found.unflatten(0, (-1, 2, head_size // 2)).transpose(1, 2).flatten(0, 2)
        if tensor.entry.transposed:
            found = found.transpose(-2, -1)
        if tensor.other is not None:
            found = torch.stack([found, read_tensor(source, tensor.other)], dim=-1).flatten(-2)
        found = found.to(tensor.dtype).contiguous()
        return found.clone() if tensor.entry.is_copy else found  # safetensors refuses shared memory

    return values
