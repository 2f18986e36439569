"""Compile and float8 through the same path as everything else."""

from typing import Any
from unittest.mock import patch

import pytest
import torch

from tests.support.helpers import TinyRun, run_in_turn, train_on_this_rank
from tests.support.layouts import degrees, trace_blocks
from titanlite.schema import Config


def graphs_and_names(rank: int, world_size: int, config: Config) -> tuple[int, list[str]]:
    """Train, and return the number of compiled graphs, and the names of parameters."""
    run = train_on_this_rank(config, rank, world_size)
    return torch._dynamo.utils.counters["stats"]["unique_graphs"], [name for name, _ in run.model.named_parameters()]


def traced(rank: int, world_size: int, config: Config) -> tuple[int, list[str]]:
    with patch("titanlite.parallelize.compile_blocks", trace_blocks):
        return graphs_and_names(rank, world_size, config)


@pytest.mark.parametrize(
    "train",
    [
        pytest.param(traced, id="traced", marks=pytest.mark.slow),
        pytest.param(graphs_and_names, marks=pytest.mark.nightly),
    ],
)
def test_compiled_blocks_share_one_graph_and_give_the_same_losses(tiny: TinyRun, train: Any) -> None:
    options = [*degrees(1, 2), "--training.steps=3", "--checkpoint.enable=false", "--model.args.n_layers=2"]
    compiled = ["--job.name=compiled", "--compile.enable", "--activation_checkpoint.mode=selective"]
    runs = [tiny.config(*words, *options, world_size=2) for words in (["--job.name=eager"], compiled)]
    [(none, names), _], [(graphs, names_of_compiled), _] = run_in_turn(train, 2, runs)
    assert (none, graphs) == (0, 1)
    assert names_of_compiled == names
    assert tiny.losses("compiled") == pytest.approx(tiny.losses("eager"), rel=1e-5)
