"""Runs with moments in 8 and 4 bits (torchao.optim): losses, sharding, saving."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.support.helpers import TinyRun, mentions, run_in_turn, run_ranks
from tests.support.layouts import built, trained, whole
from titanlite.models.base import unique_parameters
from titanlite.optim.quantized import inner_tensors, is_quantized
from titanlite.runtime.errors import UserError
from titanlite.schema import Config

pytest.importorskip("torchao.optim")


SHAPE = ["--model.args.dim=128", "--model.args.n_heads=2", "--model.args.hidden_dim=128", "--model.args.n_layers=2"]
"""Sizes whose matrices are quantized whole and in halves."""


def moments(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, np.ndarray]:
    """Return all state, gathered; of quantized moments their inner tensors."""
    found: dict[str, Tensor] = {}
    for name, parameter in unique_parameters(model):
        for key, value in optimizer.state[parameter].items():
            quantized = inner_tensors(value) if is_quantized(value) else {"": value}
            found |= {f"{name}.{key}.{piece}": whole(tensor.float()) for piece, tensor in quantized.items()}
    return {name: tensor.numpy() for name, tensor in found.items()}


def eager(rank: int, world_size: int, config: Config) -> dict[str, np.ndarray]:
    """Train without the compiler, and return the weights."""
    torch.compiler.set_stance("force_eager")
    return trained(rank, world_size, config)


def restored(rank: int, world_size: int, config: Config) -> dict[str, np.ndarray]:
    """Return the moments that a start loads from a checkpoint."""
    torch.compiler.set_stance("force_eager")
    run = built(rank, world_size, config)
    assert run.position.progress.step == 6
    return moments(run.model, run.optimizer)


@pytest.mark.nightly
def test_losses_are_near_those_of_adamw(tiny: TinyRun) -> None:
    """40 steps nearly memorise the text. Losses must differ a little, or nothing was quantized."""
    options = [*SHAPE, "--training.steps=40", "--optimizer.lr=3e-3", "--checkpoint.enable=false"]
    names = {"AdamW": "AdamW", "AdamW8bit": "torchao.optim.AdamW8bit"}
    run_in_turn(
        eager, 1, [tiny.config(*options, f"--job.name={name}", f"--optimizer.name={of}") for name, of in names.items()]
    )
    expected, found = (tiny.losses(name)[-1] for name in names)
    assert expected < 0.5
    assert found != expected
    assert found == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize(
    ("class_name", "shape"),
    [
        # 259 rows, each of one block: uneven shards
        pytest.param("AdamW8bit", "--model.args.dim=256", marks=pytest.mark.nightly),
        pytest.param("AdamW4bit", "--model.args.vocab_size=260", marks=pytest.mark.nightly),
        pytest.param("AdamWFp8", "--model.args.vocab_size=260", marks=pytest.mark.nightly),
    ],
)
def test_a_run_resumes_bit_for_bit(tiny: TinyRun, class_name: str, shape: str) -> None:
    """A run on two shards resumes there bit for bit; its moments are the same on one shard."""
    options = [*SHAPE, shape, f"--optimizer.name=torchao.optim.{class_name}"]
    configs = [
        tiny.config(*options, f"--job.name={name}", f"--training.steps={steps}", world_size=2)
        for name, steps in (("whole", 6), ("parts", 3), ("parts", 6))
    ]
    expected, _, found = run_in_turn(eager, 2, configs)
    assert tiny.losses("parts") == tiny.losses("whole")
    for name, value in expected[0].items():
        assert (found[0][name] == value).all(), name
    alone = tiny.config(*options, "--job.name=parts", "--training.steps=6")
    [on_two, _], [on_one] = run_ranks(restored, 2, configs[2]), run_ranks(restored, 1, alone)
    assert on_one.keys() == on_two.keys()
    assert sum(name.endswith("codes") for name in on_one) == 2 * (2 + 2 * 7)
    for name, value in on_two.items():
        assert value.any()
        assert np.array_equal(on_one[name], value), name


def refused(rank: int, world_size: int, config: Config) -> str:
    torch.compiler.set_stance("force_eager")
    with pytest.raises(UserError) as error:
        built(rank, world_size, config)
    return str(error.value)


@pytest.mark.slow
def test_a_checkpoint_with_other_shards_is_refused(tiny: TinyRun) -> None:
    """Shards of the checkpoint were large enough for blocks. Rows that do not divide: `tests.unit.optim`."""
    name = "--optimizer.name=torchao.optim.AdamW8bit"
    even = [*SHAPE, name, "--model.args.vocab_size=260", "--model.args.hidden_dim=48", "--model.args.n_layers=1"]
    even += ["--training.steps=1", "--lr_scheduler.warmup_steps=1"]
    run_ranks(eager, 1, tiny.config(*even))
    small, _ = run_ranks(refused, 2, tiny.config(*even, "--training.steps=2", world_size=2))
    assert "layers.0.feed_forward.w1.weight.exp_avg.codes" in small
    assert mentions(small, "4,096 elements", "float32", "replicate 1 x shard 1")
