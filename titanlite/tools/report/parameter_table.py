"""Table and record of what `parallelize` did with each parameter, for `titanlite inspect CONFIG`."""

import math
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from rich.console import Console
from rich.table import Column, Table

from titanlite.config.load import load
from titanlite.runtime.errors import UserError
from titanlite.runtime.files import json_text
from titanlite.runtime.ranks import runs_of
from titanlite.techniques import every_technique
from titanlite.tools.arguments import Count, Index
from titanlite.tools.plan.output import format_size
from titanlite.tools.plan.parameters import ParameterLayout, RankLayout, inspect_ranks


def inspect(
    config: str | None = None,
    overrides: Sequence[str] = (),
    *,
    world_size: Count | None = None,
    rank: Index = 0,
    json_: bool = False,
) -> None:
    """Show what each rank holds of a config: what the techniques do with each parameter.

    The table has shapes, placement, dtypes, FSDP unit, recompute policy, compile, float8, adapters, optimizer and bytes
    of one rank. The ranks are not real, and no GPU is needed.

    Args:
        world_size: processes; default: as many as the config's degrees ask for
        rank (R): rank to show
        json_: print JSON, with every parameter

    Example:
        llama3_8b --world-size 64
        my.toml --world-size 8 --rank 7 --json
    """
    if not config:
        raise UserError("titanlite inspect: name a config; see titanlite inspect --help")
    if world_size is None:
        parallelism = load(config, overrides).parallelism
        world_size = parallelism.data_parallel_replicate_degree * max(1, parallelism.data_parallel_shard_degree)
    if rank >= world_size:
        raise UserError(f"--rank {rank}: there are ranks 0 to {world_size - 1}; set --world-size")
    resolved = load(config, overrides, world_size=world_size)
    torch.set_num_threads(1)
    layout = inspect_ranks(resolved, world_size=world_size, rank=rank)
    show(layout_record(layout) if json_ else layout_lines(layout))


SIZES = ("parameter_bytes", "gradient_bytes", "optimizer_bytes")


def layout_record(layout: RankLayout) -> dict[str, Any]:
    """Return a layout as JSON values. Bytes are of the rank."""
    units = {name: totals(parameters) for name, parameters in by_unit(layout).items()}
    return {
        "name": layout.name,
        "rank": layout.rank,
        "mesh": layout.mesh,
        "parameters": [it.record() for it in layout.parameters],
        "units": units,
        "total": totals(layout.parameters),
    }


def totals(parameters: Iterable[ParameterLayout]) -> dict[str, int]:
    """Return the sums of the rank's bytes."""
    parameters = [*parameters]
    return {name: sum(getattr(it, name) for it in parameters) for name in SIZES}


def by_unit(layout: RankLayout) -> dict[str, list[ParameterLayout]]:
    """Return the parameters of each FSDP unit, in the order of the model."""
    units: dict[str, list[ParameterLayout]] = {}
    for it in layout.parameters:
        units.setdefault(it.unit, []).append(it)
    return units


def layout_lines(layout: RankLayout) -> Iterator[str | Table]:
    """Yield what the console prints."""
    elements = sum(math.prod(it.shape) for it in layout.parameters)
    here = sum(math.prod(it.local_shape) for it in layout.parameters)
    axes = " x ".join(f"{axis} {size}" for axis, size in layout.mesh.items())
    usual = _most_common(map(_placement, layout.parameters)), _most_common(map(_dtypes, layout.parameters))
    stored, compute, reduction = usual[1]
    yield f"{layout.name}: {elements:,} parameters in {len(layout.parameters):,} tensors"
    yield f"mesh       {axes}; rank {layout.rank} holds {here:,} of the parameters"
    yield f"placement  {usual[0]} on {' x '.join(layout.mesh)}, unless noted; S(0): sharded along dim 0, R: replicated"
    yield f"dtype      stored {stored}, compute {compute}, reduction of gradients {reduction}, unless noted"
    yield from dict.fromkeys(_update_line(it) for it in layout.parameters)
    yield _table(layout, usual=usual)


def _most_common(values: Iterable[Any]) -> Any:
    return Counter(values).most_common(1)[0][0]


def _placement(parameter: ParameterLayout) -> str:
    return " ".join(parameter.placements.values())


def _dtypes(parameter: ParameterLayout) -> tuple[str, str, str]:
    return parameter.dtype, parameter.compute_dtype, parameter.reduce_dtype


def _table(layout: RankLayout, *, usual: tuple[str, tuple[str, str, str]]) -> Table:
    """Return the table.

    Args:
        usual: placement and dtypes that are not noted.
    """
    numbers = [Column(name, justify="right", no_wrap=True) for name in ("parameter", "gradient", "optimizer")]
    texts = Column("unit, parameter", no_wrap=True), "shape", "on this rank", "update", "notes"
    table = Table(*texts, *numbers, box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for units in _alike(layout):
        parameters = next(iter(units.values()))
        name = _unit_name([*units])
        each = f", each of {len(units)}" if len(units) > 1 else ""
        table.add_row(f"{name}{each}", *[""] * 3, _unit_notes(parameters), *_sizes(totals(parameters)))
        for it in parameters:
            shapes = str(it.shape), str(it.local_shape)
            table.add_row(f"  {_short_name(it)}", *shapes, _update(it) or "", _notes(it, usual), *_sizes(totals([it])))
    total = totals(layout.parameters)
    table.add_row("all units", *[""] * 4, *_sizes(total))
    table.add_row("together", *[""] * 4, format_size(sum(total.values())))
    return table


def _alike(layout: RankLayout) -> list[dict[str, list[ParameterLayout]]]:
    """Return the FSDP units, those together that differ in nothing but the number of their block."""
    groups: dict[Any, dict[str, list[ParameterLayout]]] = {}
    for name, parameters in by_unit(layout).items():
        facts = [{**it.record(), "name": _short_name(it), "unit": split_block(name) is not None} for it in parameters]
        key = name if split_block(name) is None else str(facts)
        groups.setdefault(key, {})[name] = parameters
    return [*groups.values()]


def _unit_name(units: list[str]) -> str:
    parts = [part for part in map(split_block, units) if part]
    return f"{parts[0][0]}.{','.join(runs_of(number for _, number, _ in parts))}" if parts else units[0]


def _short_name(parameter: ParameterLayout) -> str:
    """Return the name without that of the unit."""
    return parameter.name.removeprefix(f"{parameter.unit}.")


def _unit_notes(parameters: list[ParameterLayout]) -> str:
    policy = parameters[0].recompute
    notes = [f"recompute {policy}"] if policy not in (None, "none") else []
    return ", ".join(notes + ["compiled"] * parameters[0].compiled)


def _notes(parameter: ParameterLayout, usual: tuple[str, tuple[str, str, str]]) -> str:
    notes = {
        "frozen": parameter.frozen,
        **{note: True for it in every_technique() if (note := it.parameter_note(parameter.facts))},
        _placement(parameter): _placement(parameter) != usual[0],
        " / ".join(_dtypes(parameter)): _dtypes(parameter) != usual[1],
    }
    return ", ".join(note for note, is_noted in notes.items() if is_noted)


def _update(parameter: ParameterLayout) -> str | None:
    return f"{parameter.optimizer} {parameter.group}".rstrip() if parameter.optimizer else None


def _update_line(parameter: ParameterLayout) -> str:
    if (update := _update(parameter)) is None:
        return "frozen     no gradient, no update"
    decay = "" if parameter.weight_decay is None else f", weight decay {parameter.weight_decay:g}"
    return f"update     {update}: peak lr {parameter.lr:g}{decay}"


def _sizes(sizes: dict[str, int]) -> list[str]:
    return [format_size(sizes[name]) for name in SIZES]


def show(output: dict[str, Any] | Iterable[str | Table]) -> None:
    """Print a record as JSON, or lines and tables for people."""
    if isinstance(output, dict):
        print(json_text(output, indent=1))
        return
    console = Console(width=None if os.isatty(1) else 1000, markup=False, emoji=False, highlight=False)
    for part in output:
        console.print(part, soft_wrap=isinstance(part, str))  # in a pipe, lines are not wrapped


BLOCK = re.compile(r"((?:.*\.)?layers)\.(\d+)(\..+)?")


def split_block(name: str) -> tuple[str, int, str] | None:
    """Return (layers, 3, .attention.wq.weight) of layers.3.attention.wq.weight; None for a name outside of blocks."""
    match = BLOCK.fullmatch(name)
    return (match[1], int(match[2]), match[3] or "") if match else None
