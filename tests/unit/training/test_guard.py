"""Steps that are taken and skipped: the rule alone, value by value."""

import math
from collections.abc import Sequence

import pytest
import torch

from tests.support.helpers import mentions, world
from titanlite.guard import REASONS, SkipReason, SpikeFound, StepGuard, StoppedByGuard
from titanlite.schema import Guard
from titanlite.step import StepResult

NAN, INF = math.nan, math.inf
TAKEN, NONFINITE, SPIKE, AFTER_STOP, LOSS_SCALE, ROLLBACK = SkipReason


def guard_of(
    state: dict[str, object] | None = None, *, step: int = 0, window: int = 128, has: bool = False, **options: object
) -> StepGuard:
    config, device = Guard.model_validate(options), torch.device("cpu")
    return StepGuard(config, device=device, step=step, state=dict(state or {}), window=window, can_go_back=lambda: has)


def skip_reasons(guard: StepGuard, metrics: Sequence[tuple[float, float]], *, first: int = 1) -> list[int]:
    found = []
    for step, (loss, norm) in enumerate(metrics, first):
        pair = torch.tensor(loss), torch.tensor(norm)
        skip_reason = guard.decide(*pair)
        found.append(int(skip_reason))
        guard.remember(step, StepResult(pair[0], torch.zeros(()), pair[1], skip_reason, pair[0][None], pair[1]))
    return found


def test_after_a_stop_no_step_is_taken() -> None:
    metrics = [(3, 1), (NAN, 1), (2, 1), (NAN, NAN)]
    assert skip_reasons(guard_of(nonfinite="stop"), metrics) == [TAKEN, NONFINITE, AFTER_STOP, AFTER_STOP]


@pytest.mark.parametrize("bad", [(NAN, 1), (INF, 1), (3, NAN), (3, INF)])
def test_each_bad_step_is_skipped_up_to_the_limit(bad: tuple[float, float]) -> None:
    guard = guard_of(nonfinite="skip", max_consecutive_skips=3)
    metrics = [(3, 1), bad, bad, (3, 1), bad, bad, bad, (3, 1)]
    assert skip_reasons(guard, metrics) == [TAKEN, 1, 1, TAKEN, 1, 1, 1, AFTER_STOP]


@pytest.mark.usefixtures("single_process_group")
def test_a_check_returns_the_skipped_steps() -> None:
    guard = guard_of(nonfinite="skip", max_consecutive_skips=3)
    skip_reasons(guard, [(3, 1), (NAN, 2), (3, 1)])
    [skipped] = guard.check(world())
    assert (skipped.step, skipped.reason, skipped.grad_norm) == (2, REASONS[SkipReason.NONFINITE], 2)
    assert math.isnan(skipped.loss)
    assert math.isnan(skipped.micro_losses[0][0])
    assert skipped.shard_grad_norms == [2]
    assert guard.check(world()) == []
    skip_reasons(guard, [(INF, 1), (INF, 1), (INF, 1), (3, 1)], first=4)
    with pytest.raises(StoppedByGuard) as stopped:
        guard.check(world())
    assert mentions(str(stopped.value), "step 6", "loss inf", "grad_norm 1", "3 steps", "guard.max_consecutive_skips")
    assert stopped.value.taken == 3
    assert [one.step for one in stopped.value.skipped] == [4, 5, 6]
    assert stopped.value.exit_code == 3


def test_spikes() -> None:
    """A spike is sigma standard deviations above the mean of loss or norm, once half of the window is there."""
    guard = guard_of(spike_sigma=4, window=8)
    calm = [(3 + 0.1 * (-1) ** i, 1 + 0.1 * (-1) ** i) for i in range(8)]
    deviation = 0.1 * math.sqrt(8 / 7)
    assert skip_reasons(guard, [(3, 1), (9, 1), (3, 1)]) == [TAKEN] * 3  # too early
    guard = guard_of(spike_sigma=4, window=8)
    assert skip_reasons(guard, calm) == [TAKEN] * 8
    state = guard.state()
    for metrics, expected in {
        (3 + 3.99 * deviation, 1): TAKEN,
        (3 + 4.01 * deviation, 1): SPIKE,
        (3, 1 + 3.99 * deviation): TAKEN,
        (3, 1 + 4.01 * deviation): SPIKE,
        (0.1, 0.01): TAKEN,
        (NAN, 1): NONFINITE,
    }.items():
        again = guard_of(state, spike_sigma=4, window=8, nonfinite="skip")
        assert skip_reasons(again, [metrics]) == [expected], metrics


def test_a_lasting_change_is_no_spike_for_long() -> None:
    guard = guard_of(spike_sigma=6, window=8, max_consecutive_skips=5)
    found = skip_reasons(guard, [(3 + 0.01 * (-1) ** i, 1) for i in range(8)] + [(4, 1)] * 8)
    assert found[8] == SPIKE
    assert found[-1] == TAKEN
    assert AFTER_STOP not in found


def test_what_follows_is_the_same_after_a_resume() -> None:
    options = {"spike_sigma": 2.0, "window": 16, "nonfinite": "skip", "max_consecutive_skips": 4}
    random = torch.Generator().manual_seed(0)
    metrics = [(float(3 + torch.randn((), generator=random)), 1.0) for _ in range(60)]
    metrics[28:31] = [(NAN, 1.0)] * 3  # the run stops and resumes between them
    whole = guard_of(None, **options)
    expected = skip_reasons(whole, metrics)
    assert SPIKE in expected[:30]
    assert SPIKE in expected[31:]
    first = guard_of(None, **options)
    skip_reasons(first, metrics[:30])
    second = guard_of(first.state(), step=30, **options)
    assert skip_reasons(second, metrics[30:]) == expected[30:]
    assert second.state() == whole.state()


CALM = [(3 + 0.01 * (-1) ** i, 1.0) for i in range(8)]


@pytest.mark.usefixtures("single_process_group")
def test_a_spike_stops_all_updates_until_the_run_goes_back() -> None:
    """The host may look several steps later, and finds the first spike."""
    guard = guard_of({"rollbacks": 1}, spike_sigma=6, window=8, on_spike="rollback", has=True)
    metrics = [*CALM, (9, 1), (3, 1), (9, 1), (NAN, 1)]
    assert skip_reasons(guard, metrics) == [*[TAKEN] * 8, ROLLBACK, *[AFTER_STOP] * 3]
    with pytest.raises(SpikeFound) as found:
        guard.check(world())
    assert (found.value.taken, [one.step for one in found.value.skipped], found.value.exit_code) == (8, [9], 3)
    assert guard.state() == {"rollbacks": 1}
    guard.resume(4, {"rollbacks": 2, "window": [[3.0] * 4, [1.0] * 4]})
    assert guard.state() == {"rollbacks": 2, "window": [[3.0] * 4, [1.0] * 4]}
    assert skip_reasons(guard, [(3, 1), (9, 1)], first=5) == [TAKEN, ROLLBACK]


@pytest.mark.usefixtures("single_process_group")
@pytest.mark.parametrize(("on_spike", "has"), [("rollback", False), ("skip", True)])
def test_without_a_checkpoint_a_spike_is_skipped(on_spike: str, has: bool) -> None:
    guard = guard_of(spike_sigma=6, window=8, on_spike=on_spike, has=has)
    assert skip_reasons(guard, [*CALM, (9, 1), (3, 1)]) == [*[TAKEN] * 8, SPIKE, TAKEN]
    assert [one.step for one in guard.check(world())] == [9]
