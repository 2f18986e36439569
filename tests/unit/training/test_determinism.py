"""Two runs on one layout are equal bit by bit, and nothing beside training shifts what it draws."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.support.helpers import TinyRun, run_in_turn, train_on_this_rank
from tests.support.layouts import whole
from titanlite.models.layers import FeedForward
from titanlite.schema import Config

BESIDE = {
    "nothing": [],
    "logging": ["--metrics.log_freq=2", "--metrics.loggers=['tensorboard']"],
    "validation": ["--validation.enable", "--validation.freq=2", "--validation.sequences=8"],
    "checkpoints": ["--checkpoint.interval=2", "--checkpoint.async_mode=disabled"],
    "checkpoints beside training": ["--checkpoint.interval=1"],
    "workers": ["--data.num_workers=2"],
    "the spike rule": ["--guard.spike_sigma=6"],
}


@pytest.mark.slow
@pytest.mark.usefixtures("single_process_group")
def test_random_draws_are_never_shifted(tiny: TinyRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model has dropout, which draws in each step."""
    plain = FeedForward.forward

    def with_dropout(self: FeedForward, x_BLD: Tensor) -> Tensor:
        return F.dropout(plain(self, x_BLD), 0.2, training=self.training)

    undisturbed = final_state(tiny.config("--training.steps=4", "--job.name=plain"))
    monkeypatch.setattr(FeedForward, "forward", with_dropout)
    states = {}
    for number, (what, options) in enumerate(BESIDE.items()):
        torch.manual_seed(number)  # whatever was drawn before
        validation = f'--validation.path="{tiny.text}"'
        states[what] = final_state(tiny.config("--training.steps=4", f"--job.name={number}", validation, *options))
    assert any((states["nothing"][name] != weight).any() for name, weight in undisturbed.items())
    for what, state in states.items():
        for name, weight in states["nothing"].items():
            assert torch.equal(state[name], weight), (what, name)


def final_state(config: Config) -> dict[str, Tensor]:
    """Weights, and the state of the generator."""
    run = train_on_this_rank(config, 0, 1)
    return {name: whole(parameter.detach()).clone() for name, parameter in run.model.named_parameters()}


def deterministically(rank: int, world_size: int, config: Config) -> dict[str, Any]:
    from titanlite.runtime.process_group import use_deterministic_kernels

    use_deterministic_kernels()
    with pytest.raises(RuntimeError, match="deterministic"):
        torch.zeros(4).put_(torch.tensor([0]), torch.tensor([1.0]), accumulate=False)
    train_on_this_rank(config, rank, world_size)
    import os

    return {"on": torch.are_deterministic_algorithms_enabled(), "cublas": os.environ["CUBLAS_WORKSPACE_CONFIG"]}


@pytest.mark.long
def test_deterministic_kernels_are_enough_to_train(tiny: TinyRun) -> None:
    options = ["--debug.deterministic", "--training.z_loss=1e-4", "--data.document_mask"]
    configs = [tiny.config(f"--job.name={name}", *options) for name in ("one", "two")]
    for [found] in run_in_turn(deterministically, 1, configs):
        assert found == {"on": True, "cublas": ":4096:8"}
    assert tiny.losses("one") == tiny.losses("two")
    assert tiny.records("one")[-1]["added_loss"] > 0
