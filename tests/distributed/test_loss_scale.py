"""float16 with dynamic loss scaling: against torch.amp.GradScaler, on every layout, after a resume; what is refused."""

import json
from functools import partial
from itertools import islice, pairwise
from typing import Any
from unittest.mock import patch

import pytest
import torch

from tests.support.helpers import TinyRun, run_in_turn, world
from tests.support.layouts import LAYOUTS, built, degrees, job, trained, whole
from tests.support.models import plain_step
from titanlite.guard import REASONS, SkipReason, StepGuard, StoppedByGuard
from titanlite.schema import Config, Guard
from titanlite.step import StepResult, count_valid_tokens
from titanlite.techniques.loss_scale.scale import INITIAL_SCALE, ScaledStep

FLOAT16 = "--training.mixed_precision_param=float16"
CPU = torch.device("cpu")
TOO_LARGE = 2.0**23
"""Scale at which gradients of tiny runs overflow, also at half of it: with PyTorch 2.13 above 2^17, with 2.15 above
2^20."""
INTERVAL = 4
"""Steps without an overflow after which the scale of these tests grows."""
TAKEN, NONFINITE, _, AFTER_STOP, OVERFLOW, _ = SkipReason
REASON = REASONS[OVERFLOW]


def by_rule(overflows: list[bool]) -> list[tuple[float, int]]:
    """Return the scale, and the finite steps since it changed, before each step by the rule of GradScaler."""
    scale, finite, found = TOO_LARGE, 0, []
    for has_overflown in overflows:
        found.append((scale, finite))
        finite = 0 if has_overflown else finite + 1
        scale *= 0.5 if has_overflown else 2 if finite == INTERVAL else 1
        finite %= INTERVAL
    return found


def guard_of(**options: Any) -> StepGuard:
    return StepGuard(Guard.model_validate(options), device=CPU, step=0, state={})


def skip_reasons(scale: Any, guard: StepGuard, norms: list[float], *, loss: float = 2.0) -> list[int]:
    found = []
    for step, norm in enumerate(norms, 1):
        pair = torch.tensor(loss), torch.tensor(norm)
        skip_reason = scale.ask(guard.decide, *pair)
        found.append(int(skip_reason))
        guard.remember(step, StepResult(pair[0], torch.zeros(()), pair[1], skip_reason, pair[0][None], pair[1]))
    return found


def train_by_grad_scaler(run: Any, scaler: torch.amp.GradScaler) -> None:
    [batch] = islice(run.batches, 1)
    loss = run.model(batch["tokens"], loss=partial(run.train_step.loss_function, labels_BL=batch["labels"]))
    scaler.scale(loss.total * (1 / count_valid_tokens([batch], run.train_step.group))).backward()
    scaler.step(run.optimizer)
    scaler.update()
    run.optimizer.zero_grad()


def scaled_step(**state: float) -> Any:
    model = torch.nn.Linear(1, 1)
    return plain_step(model, torch.optim.SGD(model.parameters()), ScaledStep, state={"loss_scale": state})


def train_by_titanlite(run: Any) -> float:
    result = run.train_step(list(islice(run.batches, 1)), decide=run.guard.decide)
    return float(result.model_metrics["loss_scale"])


@pytest.mark.usefixtures("single_process_group")
@patch.multiple("titanlite.techniques.loss_scale.scale", GROWTH_INTERVAL=INTERVAL, INITIAL_SCALE=TOO_LARGE)
def test_training_is_that_of_grad_scaler(tiny: TinyRun) -> None:
    """The scales and the weights of 16 steps, from a scale that overflows: the same bits."""
    options = [FLOAT16, "--training.max_norm=0", "--training.steps=16"]
    ours, theirs = (built(0, 1, tiny.config(*options, f"--job.name={name}")) for name in ("ours", "theirs"))
    scaler = torch.amp.GradScaler("cpu", init_scale=TOO_LARGE, growth_interval=INTERVAL)
    scales = []
    for _ in range(16):
        wanted = scaler.get_scale()
        train_by_grad_scaler(theirs, scaler)
        assert train_by_titanlite(ours) == wanted
        scales.append(wanted)
        for (name, mine), their in zip(ours.model.named_parameters(), theirs.model.parameters(), strict=True):
            assert torch.equal(whole(mine), whole(their)), name
    assert [TOO_LARGE / scale for scale in scales[:3]] == [1, 2, 4], "two overflows"
    assert any(later > scale for scale, later in pairwise(scales)), "the scale grows, too"


def trained_from_too_large(rank: int, world_size: int, config: Config) -> dict[str, Any]:
    with (
        patch("titanlite.techniques.loss_scale.scale.GROWTH_INTERVAL", INTERVAL),
        patch("titanlite.techniques.loss_scale.scale.INITIAL_SCALE", TOO_LARGE),
    ):
        return trained(rank, world_size, config)


@pytest.mark.parametrize("layouts", [[(1, 1), (1, 2)], pytest.param(LAYOUTS, marks=pytest.mark.nightly)])
def test_every_layout_skips_the_same_steps_and_a_resume_goes_on_with_the_scale(
    tiny: TinyRun, layouts: list[tuple[int, int]]
) -> None:
    """A skipped overflow is none of `guard.max_consecutive_skips`, and `grad_norm` is that of unscaled gradients."""
    options = [FLOAT16, "--training.steps=16", "--training.local_batch_size=1", "--training.global_batch_size=4"]
    options += ["--guard.max_consecutive_skips=1"]
    runs = [(layout, f"--job.name={job('on', *layout)}") for layout in layouts]
    runs += [((1, 1), "--job.name=parts", "--training.steps=10"), ((1, 1), "--job.name=parts")]
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
        overflows = [record["grad_norm"] is None for record in records]
        assert [record["loss_scale"] for record in records] == [scale for scale, _ in by_rule(overflows)], name
        assert overflows[:2] == [True] * 2, name
        first = overflows.index(False)
        evidence = tiny.records(name, file="skipped.jsonl")
        assert [(record["step"], record["reason"]) for record in evidence] == [
            (step, REASON) for step, overflow in enumerate(overflows, 1) if overflow
        ]
        assert [record["loss"] for record in records] == pytest.approx([record["loss"] for record in one], rel=1e-5), (
            name
        )
        assert 1 < records[first]["grad_norm"] < 2, "of unscaled gradients: in float32, steps have 1.58 to 1.64"
    # Saved between two changes of the scale: the rest has the same bits, and so has the scale.
    file = tiny.folder / "outputs/parts/checkpoints/step-00000010/manifest.json"
    value, finite = by_rule([record["grad_norm"] is None for record in one])[10]
    assert json.loads(file.read_text())["guard"] == {"loss_scale": {"value": value, "finite_steps": finite}}
    whole, parts = (
        [(record["loss"], record["grad_norm"], record["loss_scale"]) for record in records]
        for records in (one, tiny.records("parts"))
    )
    assert parts == whole


@pytest.mark.usefixtures("single_process_group")
def test_at_a_scale_of_1_an_overflow_is_the_guards() -> None:
    """16 halvings are steps like others. What is not finite then stops the run, whose state is that of step 17."""
    group = world()
    inf, scale = float("inf"), scaled_step()
    guard = guard_of()
    assert skip_reasons(scale, guard, [inf] * 16 + [1.0, inf, 1.0]) == [*[OVERFLOW] * 16, TAKEN, NONFINITE, AFTER_STOP]
    assert guard.state() | scale.checkpoint_state() == {"loss_scale": {"value": 1.0, "finite_steps": 1}}
    with pytest.raises(StoppedByGuard, match=f"step 18: {REASONS[NONFINITE]}") as stopped:
        guard.check(group)
    assert (stopped.value.taken, stopped.value.exit_code) == (17, 3)
    assert [skipped.reason for skipped in stopped.value.skipped[:16]] == [REASON] * 16


@pytest.mark.usefixtures("single_process_group")
@pytest.mark.parametrize("nonfinite", ["stop", "skip"])
def test_a_loss_that_is_not_finite_leaves_the_scale(nonfinite: str) -> None:
    scale = scaled_step()
    assert skip_reasons(scale, guard_of(nonfinite=nonfinite), [float("inf")], loss=float("nan")) == [NONFINITE]
    assert float(scale.scale) == INITIAL_SCALE == 2.0**16


@pytest.mark.usefixtures("single_process_group")
def test_the_scale_stays_finite() -> None:
    """It is saved in checkpoints, and 0 times infinity would make gradients NaN."""
    scale = scaled_step(value=2.0**126, finite_steps=0)
    with patch("titanlite.techniques.loss_scale.scale.GROWTH_INTERVAL", 1):
        assert skip_reasons(scale, guard_of(), [1.0] * 3) == [TAKEN] * 3
    assert float(scale.scale) == 2.0**127
