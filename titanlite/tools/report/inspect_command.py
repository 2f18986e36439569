"""The `titanlite inspect` command: what each rank holds, of a config or in a checkpoint."""

import json
import os
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from titanlite.config.load import load
from titanlite.runtime.errors import UserError
from titanlite.tools.plan.parameters import inspect_ranks
from titanlite.tools.report.parameter_table import layout_lines, layout_record
from titanlite.tools.report.pieces import pieces_lines, pieces_record, read_pieces


def inspect_config(
    path: str, overrides: Sequence[str], *, world_size: int | None, rank: int, whole: bool, as_json: bool
) -> None:
    """Print what the techniques of a config do with each parameter on one rank.

    Args:
        world_size: None takes as many as the degrees of the config ask for.
        whole: print each block, where those that are alike would be one set of rows.

    Raises:
        UserError: the config is wrong, or there is no such rank.
    """
    world_size = world_size or _smallest_world(path, overrides)
    config = load(path, overrides, world_size=world_size)
    if rank >= world_size:
        raise UserError(f"--rank {rank}: there are ranks 0 to {world_size - 1}; set --world-size")
    torch.set_num_threads(1)
    layout = inspect_ranks(config, world_size=world_size, rank=rank)
    show(layout_record(layout) if as_json else layout_lines(layout, whole=whole))


def inspect_checkpoint(path: str, *, whole: bool, as_json: bool) -> None:
    """Print which files hold which tensors of a checkpoint.

    Raises:
        UserError: there is no checkpoint, or it is damaged.
    """
    stored = read_pieces(path)
    show(pieces_record(stored) if as_json else pieces_lines(stored, whole=whole))


def _smallest_world(path: str, overrides: Sequence[str]) -> int:
    """Return the fewest processes that the degrees of a config allow."""
    parallelism = load(path, overrides).parallelism
    return parallelism.data_parallel_replicate_degree * max(1, parallelism.data_parallel_shard_degree)


def show(output: dict[str, Any] | Iterable[str | Table]) -> None:
    """Print a record as JSON, or lines and tables for people."""
    if isinstance(output, dict):
        print(json.dumps(output, indent=1))
        return
    console = Console(width=None if os.isatty(1) else 1000, markup=False, emoji=False, highlight=False)
    for part in output:
        console.print(part, soft_wrap=isinstance(part, str))  # in a pipe, lines are not wrapped
