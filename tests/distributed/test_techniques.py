"""Compile and float8 through the same path as everything else."""

from typing import Any
from unittest.mock import patch

import pytest
import torch

from tests.helpers import TinyRun, run_in_turn, train_on_this_rank
from tests.layouts import degrees, trace_blocks, trained
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


@pytest.mark.usefixtures("single_process_group")
def test_float8_trains(tiny: TinyRun) -> None:
    """Other recipes: tests/unit/test_float8.py. On several ranks: tests/distributed/test_float8.py."""
    sizes = ["--model.args.dim=48", "--model.args.hidden_dim=64", "--training.steps=3", "--optimizer.lr=1e-3"]
    float8 = [f"--quantize.linear.float8.{option}" for option in ("enable", "emulate", "skip_small=false")]
    for name, options in (("plain", []), ("float8", float8)):
        trained(0, 1, tiny.config(f"--job.name={name}", *sizes, *options, "--checkpoint.enable=false"))
    assert tiny.losses("float8") != tiny.losses("plain")
    assert tiny.losses("float8") == pytest.approx(tiny.losses("plain"), rel=0.03)
