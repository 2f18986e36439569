"""Scales of weights that are gathered in float8: one all-reduce a step, and the same training."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.helpers import TinyRun, run_in_turn
from tests.layouts import built, degrees
from titanlite.loss import TokenLoss
from titanlite.schema import Config
from titanlite.train import finish, train

LAYERS = 7
"""Linear layers that are converted."""
SIZES = ["--model.args.dim=48", "--model.args.hidden_dim=64"]
FLOAT8 = [f"--quantize.linear.float8.{option}" for option in ("enable", "emulate", "skip_small=false")]
APART = "--quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp=false"


def scale_reductions(rank: int, world_size: int, config: Config) -> int:
    """Train; the loss of step 3 is NaN. Returns the all-reduces of scales, the only functional ones."""
    run = built(rank, world_size, config)
    calls = [run.progress.step]

    def loss_of(*args: Any, **kwargs: Any) -> TokenLoss:
        found = run.loss_function(*args, **kwargs)
        calls[0] += torch.is_grad_enabled()
        bad = math.nan if calls[0] == 3 else 1.0
        return TokenLoss(found.total * bad, found.cross_entropy * bad)

    reductions, all_reduce = [0], torch.ops._c10d_functional.all_reduce

    def counted(*args: Any, **kwargs: Any) -> Any:
        reductions[0] += 1
        return all_reduce(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.ops._c10d_functional, "all_reduce", counted)
        train(replace(run, loss_function=loss_of))
    finish(run)
    return reductions[0]


@pytest.mark.slow
def test_one_all_reduce_for_all_scales(tiny: TinyRun) -> None:
    pytest.importorskip("torchao")
    more = ["--validation.enable", f"--validation.path={tiny.text}", "--validation.freq=2", "--guard.nonfinite=skip"]
    more += ["--validation.sequences=4", *SIZES, *FLOAT8]

    def config(name: str, *options: str) -> Config:
        return tiny.config(f"--job.name={name}", *more, *degrees(1, 2), *options, world_size=2)

    configs = [config("halves", "--training.steps=4"), config("halves"), config("apart", APART)]
    (first, _), (second, _), (apart, _) = run_in_turn(scale_reductions, 2, configs)
    assert (first, second) == (4 + 1, 2 + 1), "one a step, and one before the first"
    assert apart == (6 * 2 + 3) * LAYERS, "one for each gather: forward, backward, and 3 validations"
    # The losses are those of scales that each gather computes: after a step that is left out, after loading, and of
    # validation, which comes between an update and the next step.
    losses = tiny.losses("apart")
    assert [loss is None for loss in losses] == [False, False, True, False, False, False]
    assert tiny.losses("halves") == losses
    runs = (tiny.records(name, file="validation.jsonl") for name in ("halves", "apart"))
    both = [[record | {"time": 0.0} for record in records] for records in runs]
    assert len(both[0]) == 3
    assert both[0] == both[1]
