"""The `titanlite inspect` command: what each rank holds, of a config or in a checkpoint."""

from collections.abc import Sequence
from pathlib import Path

import torch

from titanlite.config.load import load
from titanlite.config.shipped import find_config
from titanlite.runtime.errors import UserError
from titanlite.tools.arguments import Count, Index
from titanlite.tools.plan.parameters import inspect_ranks
from titanlite.tools.report.parameter_table import layout_lines, layout_record, show
from titanlite.tools.report.pieces import pieces_lines, read_pieces


def inspect(
    config: str | None = None,
    overrides: Sequence[str] = (),
    *,
    world_size: Count | None = None,
    rank: Index | None = None,
    all_: bool = False,
    memory: bool = False,
    json_: bool = False,
) -> None:
    """Show what each rank holds: of a config, or in a checkpoint.

    A config: what the techniques do with each parameter on one rank. The table has shapes, placement, dtypes, FSDP
    unit, recompute policy, compile, float8, adapters, optimizer and bytes. The ranks are not real, and no GPU is
    needed.

    A checkpoint, or a run (its newest one): which ranks' files hold which tensors, and that they hold each element
    exactly once. Exit code 2 if not. `checkpoint verify` also reads every byte.

    With --memory, a run: memory by phase as its first steps measured it, beside that of a plan of its config.

    Args:
        world_size: processes; default: as many as the config's degrees ask for
        rank (R): rank to show; default: 0
        all_: show every block, also those that are alike
        memory: of a run: memory by phase as its first steps measured it, and the plan's
        json_: print JSON, with every parameter or tensor

    Example:
        llama3_8b --world-size 64
        my.toml --world-size 8 --rank 7 --json
        outputs/debug
        outputs/debug/checkpoints/step-00000100 --all
        outputs/debug --memory
    """
    if not config:
        raise UserError("titanlite inspect: name a config, a run or a checkpoint; see titanlite inspect --help")
    file = str(find_config(config))
    is_stored = memory or "://" in config or Path(file).is_dir()
    given = {"--world-size": world_size, "--rank": rank, "--all": (memory and all_) or None}
    unused = [name for name, value in given.items() if value is not None] + [*overrides]
    if memory and not Path(config).is_dir():
        raise UserError(f"titanlite inspect: --memory is for the folder of a run, and {config} is none")
    if is_stored and unused:
        why = "and --memory exclude each other" if memory else f"is for a config, and {config} is a run or a checkpoint"
        raise UserError(f"titanlite inspect: {unused[0]} {why}")
    if memory:
        from titanlite.tools.report.run_memory import print_memory

        print_memory(Path(config), as_json=json_)
    elif is_stored:
        inspect_checkpoint(config, whole=all_, as_json=json_)
    else:
        if world_size is not None and (rank or 0) >= world_size:
            raise UserError(f"titanlite inspect: --rank {rank}: there are ranks 0 to {world_size - 1}")
        inspect_config(file, overrides, world_size=world_size, rank=rank or 0, whole=all_, as_json=json_)


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
    show(stored if as_json else pieces_lines(stored, whole=whole))


def _smallest_world(path: str, overrides: Sequence[str]) -> int:
    """Return the fewest processes that the degrees of a config allow."""
    parallelism = load(path, overrides).parallelism
    return parallelism.data_parallel_replicate_degree * max(1, parallelism.data_parallel_shard_degree)
