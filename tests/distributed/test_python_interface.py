"""The Python interface in programs that have opened a process group, as Ray Train, Accelerate and Lightning do."""

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import titanlite
from tests.support.helpers import TinyRun, run_ranks


def train_in_open_group(rank: int, world_size: int, toml: Path, outputs: Path) -> tuple[list[float | None], float]:
    """Train twice, and return the losses and a sum over the ranks of the group, which is as it was."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)
    options = {"job.dump_folder": str(outputs), "job.name": "open", "checkpoint.interval": 2}
    before = dist.group.WORLD
    with pytest.raises(titanlite.ConfigError, match="data_parallel_shard_degree"):
        titanlite.run_training(
            titanlite.load_config(toml, {**options, "parallelism.data_parallel_shard_degree": world_size + 1})
        )
    titanlite.run_training(titanlite.load_config(toml, {**options, "training.steps": 2}))
    records = titanlite.run_training(titanlite.load_config(toml, {**options, "training.steps": 4}))
    assert dist.group.WORLD is before
    total = torch.tensor(float(rank + 1))
    dist.all_reduce(total)
    return records.column("loss"), float(total)


def test_an_open_process_group_is_used_and_left_open(tiny: TinyRun) -> None:
    results = run_ranks(train_in_open_group, 2, tiny.toml, tiny.folder / "outputs")
    losses = tiny.losses("open")
    assert len(losses) == 4
    assert results == [(losses, 3.0)] * 2
