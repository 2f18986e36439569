"""float16 with dynamic loss scaling: against torch.amp.GradScaler, on every layout, after a resume; what is refused."""

import json
from functools import partial
from itertools import islice
from typing import Any
from unittest.mock import patch

import pytest
import torch

from tests.helpers import TinyRun, run_in_turn, world
from tests.layouts import LAYOUTS, built, degrees, job, trained, whole
from titanlite.guard import REASONS, SkipReason, StepGuard, StoppedByGuard
from titanlite.schema import Config, Guard
from titanlite.step import StepResult, count_valid_tokens, train_step
from titanlite.techniques.loss_scale.scale import INITIAL_SCALE, LossScale

FLOAT16 = "--training.mixed_precision_param=float16"
CPU = torch.device("cpu")
TOO_LARGE = 2.0**19
"""Scale at which gradients of tiny runs overflow."""
TAKEN, NONFINITE, _, AFTER_STOP, OVERFLOW = SkipReason
REASON = REASONS[OVERFLOW]


def guard_of(**options: Any) -> StepGuard:
    return StepGuard(Guard.model_validate(options), device=CPU, step=0, state={})


def skip_reasons(scale: LossScale, guard: StepGuard, norms: list[float], *, loss: float = 2.0) -> list[int]:
    found = []
    for step, norm in enumerate(norms, 1):
        pair = torch.tensor(loss), torch.tensor(norm)
        skip_reason = scale.decide(guard.decide, *pair)
        found.append(int(skip_reason))
        guard.remember(step, StepResult(pair[0], torch.zeros(()), pair[1], skip_reason, pair[0][None], pair[1]))
    return found


def train_by_grad_scaler(run: Any, scaler: torch.amp.GradScaler) -> None:
    [batch] = islice(run.batches, 1)
    loss = run.model(batch["tokens"], loss=partial(run.loss_function, labels_BL=batch["labels"]))
    scaler.scale(loss.total * (1 / count_valid_tokens([batch], run.group))).backward()
    scaler.step(run.optimizer)
    scaler.update()
    run.optimizer.zero_grad()


def train_by_titanlite(run: Any, scale: LossScale) -> float:
    batches = list(islice(run.batches, 1))
    result = train_step(
        run.model, batches, optimizer=run.optimizer, group=run.group, max_norm=0.0, loss_function=run.loss_function,
        decide=run.guard.decide, gradients=scale,
    )  # fmt: skip
    return float(result.model_metrics["loss_scale"])


@pytest.mark.usefixtures("single_process_group")
def test_training_is_that_of_grad_scaler(tiny: TinyRun) -> None:
    """The scales and the weights of 16 steps, from a scale that overflows: the same bits."""
    options = [FLOAT16, "--training.max_norm=0", "--training.steps=16"]
    ours, theirs = (built(0, 1, tiny.config(*options, f"--job.name={name}")) for name in ("ours", "theirs"))
    scaler = torch.amp.GradScaler("cpu", init_scale=TOO_LARGE, growth_interval=4)
    scale = LossScale(device=CPU, state={"loss_scale": {"value": TOO_LARGE}}, growth_interval=4)
    scales = []
    for _ in range(16):
        wanted = scaler.get_scale()
        train_by_grad_scaler(theirs, scaler)
        assert train_by_titanlite(ours, scale) == wanted
        scales.append(wanted)
        for (name, mine), their in zip(ours.model.named_parameters(), theirs.model.parameters(), strict=True):
            assert torch.equal(whole(mine), whole(their)), name
    assert [TOO_LARGE / scale for scale in scales] == [1, 2, 4, 4, 4, 4, 2, 4, 4, 4, 4, 2, 2, 2, 2, 1]


def trained_from_too_large(rank: int, world_size: int, config: Config) -> dict[str, Any]:
    growth = patch.object(LossScale.__init__, "__kwdefaults__", {"growth_interval": 4})
    with growth, patch("titanlite.techniques.loss_scale.scale.INITIAL_SCALE", TOO_LARGE):
        return trained(rank, world_size, config)


@pytest.mark.parametrize("layouts", [[(1, 1), (1, 2)], pytest.param(LAYOUTS, marks=pytest.mark.nightly)])
def test_every_layout_skips_the_same_steps_and_a_resume_goes_on_with_the_scale(
    tiny: TinyRun, layouts: list[tuple[int, int]]
) -> None:
    """A skipped overflow is none of `guard.max_consecutive_skips`, and `grad_norm` is that of unscaled gradients."""
    options = [FLOAT16, "--training.steps=8", "--training.local_batch_size=1", "--guard.max_consecutive_skips=1"]
    runs = [(layout, f"--job.name={job('on', *layout)}") for layout in layouts]
    runs += [((1, 1), "--job.name=parts", "--training.steps=5"), ((1, 1), "--job.name=parts")]
    for world_size in {replicate * shard for replicate, shard in layouts}:
        configs = [
            tiny.config(*options, *degrees(*layout), *more, world_size=world_size)
            for layout, *more in runs
            if layout[0] * layout[1] == world_size
        ]
        run_in_turn(trained_from_too_large, world_size, configs)
    one = tiny.records(job("on", 1, 1))
    for layout in layouts:
        name = job("on", *layout)
        records = tiny.records(name)
        assert [TOO_LARGE / record["loss_scale"] for record in records] == [1, 2, 4, 4, 4, 4, 2, 4], name
        assert [record["grad_norm"] is None for record in records] == [True, True, *[False] * 4, True, False], name
        evidence = tiny.records(name, file="skipped.jsonl")
        assert [(it["step"], it["reason"]) for it in evidence] == [(step, REASON) for step in (1, 2, 7)]
        assert [it["loss"] for it in records] == pytest.approx([it["loss"] for it in one], rel=1e-5), name
        assert records[2]["grad_norm"] == pytest.approx(1.5776, rel=1e-3), "in float32, the first step has 1.5786"
    # Saved between two changes of the scale: the rest has the same bits, and so has the scale.
    file = tiny.folder / "outputs/parts/checkpoints/step-00000005/manifest.json"
    assert json.loads(file.read_text())["guard"] == {"loss_scale": {"value": TOO_LARGE / 4, "finite_steps": 3}}
    whole, parts = (
        [(it["loss"], it["grad_norm"], it["loss_scale"]) for it in records] for records in (one, tiny.records("parts"))
    )
    assert parts == whole


@pytest.mark.usefixtures("single_process_group")
def test_at_a_scale_of_1_an_overflow_is_the_guards() -> None:
    """16 halvings are steps like others. What is not finite then stops the run, whose state is that of step 17."""
    group = world()
    inf, scale = float("inf"), LossScale(device=CPU, state={})
    guard = guard_of()
    assert skip_reasons(scale, guard, [inf] * 16 + [1.0, inf, 1.0]) == [*[OVERFLOW] * 16, TAKEN, NONFINITE, AFTER_STOP]
    assert guard.state() | scale.state() == {"loss_scale": {"value": 1.0, "finite_steps": 1}}
    with pytest.raises(StoppedByGuard, match=f"step 18: {REASONS[NONFINITE]}") as stopped:
        guard.check(group)
    assert (stopped.value.taken, stopped.value.exit_code) == (17, 3)
    assert [it.reason for it in stopped.value.skipped[:16]] == [REASON] * 16


@pytest.mark.parametrize("nonfinite", ["stop", "skip"])
def test_a_loss_that_is_not_finite_leaves_the_scale(nonfinite: str) -> None:
    scale = LossScale(device=CPU, state={})
    assert skip_reasons(scale, guard_of(nonfinite=nonfinite), [float("inf")], loss=float("nan")) == [NONFINITE]
    assert float(scale.value) == INITIAL_SCALE == 2.0**16


def test_the_scale_stays_finite() -> None:
    """It is saved in checkpoints, and 0 times infinity would make gradients NaN."""
    state = {"loss_scale": {"value": 2.0**126, "finite_steps": 0}}
    scale = LossScale(device=CPU, state=state, growth_interval=1)
    assert skip_reasons(scale, guard_of(), [1.0] * 3) == [TAKEN] * 3
    assert float(scale.value) == 2.0**127
