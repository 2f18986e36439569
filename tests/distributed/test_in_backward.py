"""Updates within backward, on several processes: how they stop. The same bits as after it: tests/matrix.py."""

import math
from typing import Any

import torch

from tests.support.helpers import TinyRun, run_in_turn
from tests.support.layouts import built, trained, with_loss
from titanlite.guard import StoppedByGuard
from titanlite.loss import TokenLoss
from titanlite.models.base import unique_parameters
from titanlite.runtime.private_torch.tensors import local_tensor
from titanlite.schema import Config
from titanlite.train import finish, train

ON = "--optimizer.in_backward=true"
NO_CLIPPING = "--training.max_norm=0"
BAD_STEP = 3


def stopped(rank: int, world_size: int, config: Config) -> dict[str, Any]:
    """Train until step 3 has a nonfinite loss on rank 1. If the name of the run has "gradient": nonfinite gradients of
    all below the head."""
    run = built(rank, world_size, config)
    calls, right = [0], run.train_step.loss_function
    in_gradient = "gradient" in str(config.job.name)

    def poison(gradient: torch.Tensor) -> torch.Tensor:
        return gradient * math.nan if in_gradient and calls[0] == BAD_STEP and rank == 1 else gradient

    run.model.layers[-1].register_forward_hook(lambda module, args, output: output.register_hook(poison) and None)

    def loss_of(hidden_BLD: torch.Tensor, *args: Any, **kwargs: Any) -> TokenLoss:
        calls[0] += 1
        loss = right(hidden_BLD, *args, **kwargs)
        if calls[0] != BAD_STEP or rank != 1 or in_gradient:
            return loss
        return TokenLoss(loss.total * math.nan, loss.cross_entropy * math.nan)

    before: dict[str, torch.Tensor] = {}

    def remember(*_: Any) -> None:
        if calls[0] == BAD_STEP and not before:
            before.update(
                {name: local_tensor(parameter).detach().clone() for name, parameter in unique_parameters(run.model)}
            )

    run.optimizer.register_step_pre_hook(remember)
    ended = train(with_loss(run, loss_of))
    finish(run, ended)
    assert isinstance(ended, StoppedByGuard)
    moved = [
        name
        for name, parameter in unique_parameters(run.model)
        if not torch.equal(before[name], local_tensor(parameter))
    ]
    finite = all(bool(local_tensor(parameter).isfinite().all()) for parameter in run.model.parameters())
    return {"moved": moved, "finite": finite, "stop": (str(ended), ended.taken, ended.in_part, ended.exit_code)}


def test_all_ranks_stop_alike(tiny: TinyRun) -> None:
    """The state is saved after a nonfinite loss. After a nonfinite gradient the last checkpoint is resumed."""
    options = [ON, NO_CLIPPING, "--metrics.log_freq=5", "--checkpoint.interval=2"]
    names = "loss", "gradient"
    configs = [tiny.config(*options, f"--job.name={name}", world_size=2) for name in names]
    again = tiny.config(*options, "--job.name=gradient", world_size=2)
    loss, gradient = run_in_turn(stopped, 2, configs)
    for rank in loss:
        assert rank["moved"] == []
        assert rank["stop"][1:] == (2, False, 3)
    for rank in gradient:
        # Each shard decides by its own part: of embeddings, those of tokens that are not in the batch are finite.
        assert {*rank["moved"]} - {"tok_embeddings.weight"} == {"head.norm.weight", "head.output.weight"}
        assert rank["finite"]
        assert rank["stop"][1:] == (2, True, 3)
        assert "checkpoint" in rank["stop"][0]
    for ranks in (loss, gradient):
        assert ranks[0]["stop"] == ranks[1]["stop"]
    checkpoints = [sorted((tiny.folder / "outputs" / name / "checkpoints").glob("step-*")) for name in names]
    assert [[path.name for path in paths] for paths in checkpoints] == [["step-00000002"]] * 2
    run_in_turn(trained, 2, [again])
    assert [record["step"] for record in tiny.records("gradient")] == [1, 5, 6]
