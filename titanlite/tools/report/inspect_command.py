"""The `titanlite inspect` command: what each rank holds of a config."""

from collections.abc import Sequence

import torch

from titanlite.config.load import load
from titanlite.runtime.errors import UserError
from titanlite.tools.arguments import Count, Index
from titanlite.tools.plan.parameters import inspect_ranks
from titanlite.tools.report.parameter_table import layout_lines, layout_record, show


def inspect(
    config: str | None = None,
    overrides: Sequence[str] = (),
    *,
    world_size: Count | None = None,
    rank: Index = 0,
    all_: bool = False,
    json_: bool = False,
) -> None:
    """Show what each rank holds of a config: what the techniques do with each parameter.

    The table has shapes, placement, dtypes, FSDP unit, recompute policy, compile, float8, adapters, optimizer and bytes
    of one rank. The ranks are not real, and no GPU is needed.

    Args:
        world_size: processes; default: as many as the config's degrees ask for
        rank (R): rank to show
        all_: show every block, also those that are alike
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
    show(layout_record(layout) if json_ else layout_lines(layout, whole=all_))
