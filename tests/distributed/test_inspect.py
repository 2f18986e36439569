"""`titanlite inspect` has the layout and the memory that processes really have, and that of what they save."""

from typing import Any

import pytest

from tests.support.helpers import TinyRun, run_in_turn, train_on_this_rank
from tests.support.layouts import degrees
from titanlite.schema import Config
from titanlite.tools.convert.source import open_source
from titanlite.tools.report.parameters import Row, inspect_ranks, rows_of


def layouts_in_training(rank: int, world_size: int, config: Config) -> list[Row]:
    run = train_on_this_rank(config, rank, world_size)
    return rows_of(run.model, run.optimizer, config, run.setup.mesh)


@pytest.mark.slow
def test_fake_ranks_have_the_layout_of_two_processes(tiny: TinyRun) -> None:
    overrides = (
        "--training.steps=1",
        "--model.args.n_layers=1",
        "--training.mixed_precision_param=bfloat16",
        "--optimizer.name=Muon",
    )
    configs = [
        tiny.config(*overrides, f"--job.name=mesh-{shard}", *degrees(2 // shard, shard), world_size=2)
        for shard in (2, 1)
    ]
    measured = run_in_turn(layouts_in_training, 2, configs)
    for config, ranks in zip(configs, measured, strict=True):
        for rank, real in enumerate(ranks):
            assert inspect_ranks(config, world_size=2, rank=rank)["parameters"] == real
    assert measured[0][0] != measured[0][1], "shards are uneven"
    for config, ranks in zip(configs, measured, strict=True):
        folder = tiny.folder / "outputs" / str(config.job.name)
        stored: dict[str, Any] = open_source(str(folder)).metadata.state_dict_metadata
        for here in zip(*ranks, strict=True):
            sizes = [[*piece.sizes] for piece in stored[f"model.{here[0]['name']}"].chunks]
            assert sizes == [record["local_shape"] for record in here][: len(sizes)]
            assert sum(size[0] for size in sizes) == here[0]["shape"][0]
