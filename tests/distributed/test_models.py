"""Experts, compiled, and saved and loaded. On every layout, and other families: tests/matrix.py."""

from typing import Any

import pytest

from tests.support.helpers import TinyRun, run_in_turn, run_ranks, train_on_this_rank
from tests.support.layouts import built, on_one, one_step, trained, whole
from titanlite.schema import Config

MOE = [
    "--model.name=qwen3_moe",
    "--model.args.head_dim=10",
    "--model.args.n_experts=6",  # not a multiple of 4 ranks
    "--model.args.n_active_experts=2",
    "--model.args.balance_rate=0.01",
]


def state_after_training(rank: int, world_size: int, config: Config) -> dict[str, Any]:
    """Weights and persistent buffers."""
    run = train_on_this_rank(config, rank, world_size)
    return {name: whole(tensor).numpy() for name, tensor in run.model.state_dict().items()}


def test_biases_of_experts_are_saved_and_loaded_on_another_layout(tiny: TinyRun) -> None:
    options = [*MOE, "--checkpoint.interval=3"]
    half = tiny.config(*options, "--training.steps=3", "--lr_scheduler.decay_ratio=0", world_size=2)
    run_ranks(trained, 2, half)
    configs = [tiny.config(*options, *more) for more in (["--job.name=straight"], [])]
    straight, resumed = on_one(state_after_training, *configs)
    assert [record["step"] for record in tiny.records()] == [1, 2, 3, 4, 5, 6]
    assert tiny.losses() == pytest.approx(tiny.losses("straight"), rel=1e-5)
    for name, value in straight.items():
        assert abs(resumed[name] - value).max() < 1e-4, name
    [biases] = [value for name, value in straight.items() if name.endswith("bias_E")]
    assert abs(biases).max() > 0.02, "six steps of 0.01, some up and some down"


def compiled_graphs(rank: int, world_size: int, config: Config) -> tuple[int, list[float]]:
    import torch

    run = built(rank, world_size, config)
    losses = [float(one_step(run).loss) for _ in range(3)]
    return torch._dynamo.utils.counters["stats"]["unique_graphs"], losses


@pytest.mark.nightly
def test_compiled_blocks_with_experts_share_one_graph(tiny: TinyRun) -> None:
    options = [*MOE, "--activation_checkpoint.mode=selective"]
    configs = [
        tiny.config(*options, f"--job.name={name}", *more, world_size=2)
        for name, more in (("eager", []), ("compiled", ["--compile.enable"]))
    ]
    eager, compiled = run_in_turn(compiled_graphs, 2, configs)
    assert [graphs for graphs, _ in eager] == [0, 0]
    assert [graphs for graphs, _ in compiled] == [1, 1], "one for all blocks"
    assert compiled[0][1] == pytest.approx(eager[0][1], rel=1e-5)
