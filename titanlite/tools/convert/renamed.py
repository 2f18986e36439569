"""Foreign tensors under other names: split, joined and renamed when they are read."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from titanlite.models.formats import Made, Renaming, Table
from titanlite.tools.convert.reader import ForeignTensor, Part, Region

STACKS = {
    "gate_up_proj": ("gate_proj.weight", "up_proj.weight"),
    "down_proj": ("down_proj.weight",),
}
"""Stacks of all experts in models of transformers 5, and the matrices of one expert in files, in the order of rows."""


def by_table(stored: Mapping[str, ForeignTensor], table: Table) -> dict[str, ForeignTensor]:
    """Return tensors by the names of a table, where they have further ones.

    Raises:
        UserError: tensors cannot be joined.
    """
    if table.renaming is not None:
        return _renamed(stored, table.renaming)
    found: dict[str, ForeignTensor] = {}
    for name, tensor in stored.items():
        found |= _unstacked(tensor, table) or {name: tensor}
    return found


def _unstacked(stack: ForeignTensor, table: Table) -> dict[str, ForeignTensor]:
    """Return the matrices of the experts in a stack; nothing if the tensor is none, or if the table has it so.

    Files have a stack where transformers saved its own state, as `save_pretrained(save_original_format=False)` does.
    """
    place, _, last = stack.name.rpartition(".")
    parts = STACKS.get(last, ())
    names = [f"{place}.0.{part}" for part in parts]
    if not parts or len(stack.shape) != 3 or table.place(stack.name):
        return {}
    if not all(table.place(name) or table.place(f"model.{name}") for name in names):
        return {}
    experts, rows, columns = stack.shape
    size = rows // len(parts)

    def matrix(name: str, expert: int, first: int) -> ForeignTensor:
        def read(region: Region) -> Tensor:
            of_rows = slice(first + region[0].start, first + region[0].stop)
            return stack.read((slice(expert, expert + 1), of_rows, region[1]))[0]

        return ForeignTensor.in_one_part(name, (size, columns), stack.dtype, read)

    found = [
        matrix(f"{place}.{expert}.{part}", expert, i * size)
        for expert in range(experts)
        for i, part in enumerate(parts)
    ]
    return {tensor.name: tensor for tensor in found}


def _renamed(stored: Mapping[str, ForeignTensor], renaming: Renaming) -> dict[str, ForeignTensor]:
    """Return what becomes of tensors. Those that are made of several are computed when they are read.

    Raises:
        UserError: tensors cannot be joined.
    """
    metas = {name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for name, tensor in stored.items()}
    found: dict[str, ForeignTensor] = {}
    for made in renaming.read(metas):
        for name, tensor in made.tensors.items():
            if made.convert is None:
                found[name] = replace(stored[made.sources[0][0]], name=name)
            else:
                parts = _parts(name, made, stored, metas)
                found[name] = ForeignTensor(name, tuple(tensor.shape), tensor.dtype, parts)
    return found


def _parts(name: str, made: Made, stored: Mapping[str, ForeignTensor], metas: Mapping[str, Tensor]) -> list[Part]:
    """Return the parts of a tensor that are read one by one: each expert of a stack, or all of it."""
    whole = tuple(made.tensors[name].shape)
    count, one = len(made.sources[0]), (1, *whole[1:])
    if len(whole) == 3 and count == whole[0] and all(len(kind) == count for kind in made.sources):
        experts = [*zip(*made.sources, strict=True)]
        if _shape_of(name, made, {source: metas[source] for source in experts[0]}) == one:
            return [
                _part(name, made, [stored[source] for source in expert], (i, 0, 0), one)
                for i, expert in enumerate(experts)
            ]
    sources = [stored[source] for kind in made.sources for source in kind]
    return [_part(name, made, sources, (0,) * len(whole), whole)]


def _shape_of(name: str, made: Made, values: Mapping[str, Tensor]) -> tuple[int, ...] | None:
    """Return the shape of a tensor that is made of some of its sources; None if it cannot be."""
    assert made.convert is not None
    try:
        return tuple(made.convert(values)[name].shape)
    except Exception:  # whatever an operation raises that needs all of them
        return None


def _part(
    name: str, made: Made, sources: Sequence[ForeignTensor], offsets: tuple[int, ...], sizes: tuple[int, ...]
) -> Part:
    def read(region: Region) -> Tensor:
        assert made.convert is not None
        values = {source.name: source.read(tuple(slice(0, size) for size in source.shape)) for source in sources}
        return made.convert(values)[name][region]

    return Part(offsets, sizes, read)
