"""Scales of weights that are gathered in float8, and of layers that ranks split: the same training."""

import math
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch

from tests.support.helpers import TinyRun, one_process, run_in_turn, train_on_this_rank
from tests.support.layouts import built, degrees, trace_blocks, with_loss
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
    calls, right = [run.position.progress.step], run.train_step.loss_function

    def loss_of(*args: Any, **kwargs: Any) -> TokenLoss:
        found = right(*args, **kwargs)
        calls[0] += torch.is_grad_enabled()
        bad = math.nan if calls[0] == 3 else 1.0
        return TokenLoss(found.total * bad, found.cross_entropy * bad)

    reductions, all_reduce = [0], torch.ops._c10d_functional.all_reduce

    def counted(*args: Any, **kwargs: Any) -> Any:
        reductions[0] += 1
        return all_reduce(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.ops._c10d_functional, "all_reduce", counted)
        train(with_loss(run, loss_of))
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


SPLIT = ["--model.args={dim=64, n_layers=2, n_heads=4, n_kv_heads=4, hidden_dim=64}", "--checkpoint.enable=false"]
RECIPES = "tensorwise", "rowwise", "rowwise_with_gw_hp", "mxfp8"


def train_split(rank: int, world_size: int, config: Config) -> None:
    """Train; in a run named "own", each rank takes its part of a tensor for the whole."""
    with ExitStack() as stack:
        if config.job.name == "own":
            stack.enter_context(patch("titanlite.techniques.float8.split.all_reduce", lambda x, *_: x))
        if config.compile.enable:
            stack.enter_context(patch("titanlite.parallelize.compile_blocks", trace_blocks))
        train_on_this_rank(config, rank, world_size)


@pytest.mark.parametrize(
    "compiled",
    [pytest.param(RECIPES[:1], marks=pytest.mark.slow), pytest.param(["rowwise", "mxfp8"], marks=pytest.mark.nightly)],
)
def test_split_layers_have_the_scales_of_whole_ones(tiny: TinyRun, compiled: Sequence[str]) -> None:
    """Losses are those of one process with each recipe, which a rank's own scales change. For MXFP8,
    parts of layers are whole blocks."""
    pytest.importorskip("torchao")

    def config(name: str, recipe: str, *words: str, world_size: int = 1) -> Config:
        options = [*SPLIT, "--optimizer.lr=1e-3", "--training.steps=4", f"--job.name={name}"]
        options += [*FLOAT8, f"--quantize.linear.float8.recipe_name={recipe}"] if recipe else []
        return tiny.config(*options, *words, world_size=world_size)

    with one_process():
        for recipe in ("", *RECIPES):
            train_split(0, 1, config(f"one-{recipe}", recipe))
    two = partial(config, world_size=2)
    tensor = degrees(1, 1, tensor=2)
    runs = [(f"split-{recipe}", recipe, *tensor) for recipe in RECIPES]
    runs += [(f"compiled-{recipe}", recipe, *tensor, "--compile.enable") for recipe in compiled]
    runs.append(("shards", "mxfp8", *degrees(1, 2)))
    run_in_turn(train_split, 2, [two(*run) for run in (*runs, ("own", "tensorwise", *tensor))])
    for name, recipe, *_ in runs:
        assert tiny.losses(name) == pytest.approx(tiny.losses(f"one-{recipe}"), rel=1e-6), name
    assert tiny.losses("own") != pytest.approx(tiny.losses("one-tensorwise"), rel=2e-6)
    assert tiny.losses("one-mxfp8") != pytest.approx(tiny.losses("one-"), rel=5e-6)


@pytest.mark.nightly
def test_split_layers_are_gathered_in_float8(tiny: TinyRun) -> None:
    """With FSDP, stages and FSDP's all-gathers in float8, losses are those of FSDP on as many parts of the batch."""
    pytest.importorskip("torchao")
    common = [*SPLIT, *FLOAT8, "--optimizer.lr=1e-3", "--training.local_batch_size=1", "--validation.enable"]
    common += [f"--validation.path={tiny.text}", "--validation.sequences=4", "--validation.freq=3"]
    run_in_turn(train_split, 2, [tiny.config(*common, *degrees(1, 2), "--job.name=shard", world_size=2)])
    layouts = {
        "split": degrees(1, 2, tensor=2),
        "on host": [*degrees(1, 2, tensor=2), "--training.enable_cpu_offload"],
        "apart": [*degrees(1, 2, tensor=2), APART],
    }
    configs = [tiny.config(*common, *words, f"--job.name={name}", world_size=4) for name, words in layouts.items()]
    run_in_turn(train_split, 4, configs)
    for name in layouts:
        assert tiny.losses(name) == pytest.approx(tiny.losses("shard"), rel=1e-6), name
    with one_process():
        train_split(0, 1, tiny.config(*common, "--job.name=one"))
    stages = tiny.config(*common, *degrees(1, 1, tensor=2, pipeline=2), "--job.name=stages", world_size=4)
    run_in_turn(train_split, 4, [stages])
    assert tiny.losses("stages") == pytest.approx(tiny.losses("one"), rel=1e-6)
