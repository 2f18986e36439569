# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false
"""Skipping of optimizer steps whose loss or gradient is not finite or, if asked for, a spike. Decision of rollbacks.

The decision is made on the device, from values that are the same on all ranks. The optimizer reads it as a tensor, so
the host never waits for it. The host reads the decisions at log steps and before a checkpoint is saved. Once the run is
to stop, nothing more is updated: weights and optimizer stay those of before the bad step.

If backward updates parameters, that holds for the loss only. When a gradient turns out not to be finite, other
gradients have already updated their parameters. The weights then belong to no step, so they must not be saved.

A spike that asks for a rollback stops the updates too. So whenever the host reads the decision, each checkpoint is from
before the spike.
"""

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from titanlite.runtime.errors import RunStopped
from titanlite.schema import Guard
from titanlite.step import StepResult

logger = logging.getLogger(__name__)


class SkipReason(IntEnum):
    TAKEN = 0
    NONFINITE = 1
    SPIKE = 2
    AFTER_STOP = 3
    OVERFLOW = 4
    ROLLBACK = 5


SPIKE_WINDOW = 128
"""Steps in the mean that a spike is compared with. The rule starts when half of them are there."""

REASONS = {
    SkipReason.NONFINITE: "loss or gradient is not finite",
    SkipReason.SPIKE: "loss or gradient spike",
    SkipReason.ROLLBACK: "loss or gradient spike",
    SkipReason.OVERFLOW: "gradient overflow, so later losses are scaled down",
}


@dataclass(frozen=True)
class Rollback:
    """Decision to train again from a checkpoint, without the samples between its step and the step after a spike."""

    checkpoint: int
    """Step of the checkpoint or local copy."""
    saved_at: float
    """Its `Manifest.saved_at`, by which it differs from another one of that step."""
    samples: int
    """Samples that count as consumed at the checkpoint from now on."""
    rollbacks: int
    """Rollbacks of the run so far, this one included."""
    seq_len: int | None = None
    """Tokens of those samples. None in records of before: the run's."""


@dataclass(frozen=True)
class SkippedStep:
    """A step that the optimizer did not make."""

    step: int
    reason: str
    loss: float
    grad_norm: float
    micro_losses: list[list[float]]
    """Loss of each micro-batch, by rank: loss sum / valid tokens of the global batch."""
    shard_grad_norms: list[float]
    """Norm of each rank's part of the gradient. The losses of all ranks contribute to each part."""
    rollback: Rollback | None = None
    """What the run does because of it."""


class StoppedByGuard(RunStopped):
    """The run must stop. Every rank raises it at the same step.

    Args:
        taken: the last step that the optimizer made; weights and optimizer are those of its end.
        skipped: steps skipped since the last check.
        in_part: the last of them updated some parameters, and the state is of no step.
    """

    def __init__(self, message: str, *, taken: int, skipped: list[SkippedStep], in_part: bool = False) -> None:
        super().__init__(message, taken=taken)
        self.skipped = skipped
        self.in_part = in_part


class SpikeFound(StoppedByGuard):
    """The last skipped step is a spike over which the run goes back, unless it has done so too often."""


class StepGuard:
    """Decides which steps are skipped, and when the run must stop.

    Args:
        step: the step that the run resumes from.
        state: `StepGuard.state` of the checkpoint that the run resumes from.
        window: number of steps in the mean that a spike is compared with. Default: `SPIKE_WINDOW`.
        can_go_back: returns whether the run has a checkpoint, for `guard.on_spike`.
    """

    def __init__(
        self,
        config: Guard,
        *,
        device: torch.device,
        step: int,
        state: dict[str, Any],
        window: int | None = None,
        can_go_back: Callable[[], bool] = lambda: False,
    ) -> None:
        self.config = config
        self._device = device
        self._size = window or SPIKE_WINDOW
        self._can_go_back = can_go_back
        self.resume(step, state)

    def resume(self, step: int, state: dict[str, Any]) -> None:
        """Begin after a step, at the start and after a rollback. Arguments: as of the constructor."""
        device, window = self._device, self._size
        saved = torch.tensor(state.get("window", [[], []]), dtype=torch.float32, device=device)[:, -window:]
        filled = saved.shape[1]
        self._window = torch.nn.functional.pad(saved, (window - filled, 0))
        """Loss and gradient norm of the last finite steps, newest last: [2, window]."""
        self._filled = torch.tensor(filled, device=device)
        self._in_a_row = torch.tensor(state.get("in_a_row", 0), device=device)
        self._stopped = torch.tensor(False, device=device)
        self._began = torch.tensor(False, device=device)
        """True if backward updates parameters in this step."""
        self._in_part = torch.tensor(False, device=device)
        self._taken = step - state.get("in_a_row", 0)
        self.rollbacks: int = state.get("rollbacks", 0)
        self._unchecked: list[tuple[int, StepResult]] = []

    def should_skip(self, losses: Tensor) -> Tensor:
        """Decide before backward whether it must update nothing: a bool on the device.

        Args:
            losses: of the global batch; the same bits on all ranks.
        """
        self._began = losses.isfinite().all() & ~self._stopped
        return ~self._began

    def decide(self, loss: Tensor, grad_norm: Tensor, overflows: Tensor | None = None) -> Tensor:
        """Decide whether the optimizer makes its step: a `SkipReason` as a scalar on the device.

        Args:
            loss, grad_norm: of the global batch; the same bits on all ranks.
            overflows: whether the gradients are too large for a reason that the step removes itself. Such a step is
                skipped, and is no bad one.
        """
        values = torch.stack([loss, grad_norm])
        finite = values.isfinite().all()
        self._in_part = self._in_part | (self._began & ~finite)
        spike = self._is_spike(values, finite) if self.config.spike_sigma else torch.zeros_like(finite)
        goes_back = self.config.on_spike == "rollback" and self._can_go_back()
        skip_reason = torch.where(
            finite, spike * (SkipReason.ROLLBACK if goes_back else SkipReason.SPIKE), SkipReason.NONFINITE
        )
        if overflows is not None:
            skip_reason = torch.where(overflows, SkipReason.OVERFLOW, skip_reason)
        skip_reason = torch.where(self._stopped, SkipReason.AFTER_STOP, skip_reason)
        is_taken = skip_reason == SkipReason.TAKEN
        in_a_row = torch.where(is_taken, 0, self._in_a_row + 1)
        if overflows is not None:
            in_a_row = torch.where(skip_reason == SkipReason.OVERFLOW, 0, in_a_row)
        self._in_a_row = torch.where(self._stopped, self._in_a_row, in_a_row)
        self._stopped = self._stopped | (self._in_a_row >= self.config.max_consecutive_skips)
        if self.config.nonfinite == "stop":
            self._stopped = self._stopped | (skip_reason == SkipReason.NONFINITE)
        if goes_back:
            self._stopped = self._stopped | (skip_reason == SkipReason.ROLLBACK)
        return skip_reason

    def _is_spike(self, values: Tensor, finite: Tensor) -> Tensor:
        """Return True if a value is more than sigma standard deviations above the mean of the window (OLMo-core's
        rule).

        Every finite step enters the window, so that a lasting change soon stops being a spike.
        """
        size = self._window.shape[1]
        counts = torch.arange(size, device=values.device) >= size - self._filled
        n = self._filled.clamp(min=1)
        mean = (self._window * counts).sum(dim=1) / n
        deviation = (((self._window - mean[:, None]) * counts).square().sum(dim=1) / (n - 1).clamp(min=1)).sqrt()
        above = (values > mean + self.config.spike_sigma * deviation).any() & (self._filled >= size // 2)
        self._window = torch.where(finite, torch.cat([self._window[:, 1:], values[:, None]], dim=1), self._window)
        self._filled = torch.where(finite, (self._filled + 1).clamp(max=size), self._filled)
        return above

    def remember(self, step: int, result: StepResult) -> None:
        """Keep the result of a step for the next `check`. Call it after each step."""
        self._unchecked.append((step, result))

    def check(self, group: dist.ProcessGroup) -> list[SkippedStep]:
        """Read the decisions since the last check, which waits for the device. Call it on every rank at the same steps.

        Returns:
            the steps that were skipped.

        Raises:
            SpikeFound: the run goes back, if guard.max_rollbacks allows it.
            StoppedByGuard: the run must stop.
        """
        steps, self._unchecked = self._unchecked, []
        if not steps:
            return []
        skip_reasons = torch.stack([result.skip_reason for _, result in steps]).tolist()
        skipped: list[SkippedStep] = []
        in_part = bool(self._in_part)
        for (step, result), skip_reason in zip(steps, skip_reasons, strict=True):
            if skip_reason in (SkipReason.TAKEN, SkipReason.OVERFLOW):
                self._taken = step
            if skip_reason in REASONS:
                skipped.append(_describe(step, result, REASONS[SkipReason(skip_reason)], group))
                if dist.get_rank(group) == 0:
                    how = "was made in part" if in_part else "was skipped"
                    if skip_reason == SkipReason.SPIKE and self.config.on_spike == "rollback":
                        how += ", because there is no checkpoint to go back to"
                    logger.warning(f"step {step} {how}: {skipped[-1].reason} ({_values(skipped[-1])})")
        if bool(self._stopped):
            last = skipped[-1]
            reason = f"step {last.step}: {last.reason} ({_values(last)})"
            if SkipReason.ROLLBACK in skip_reasons:
                reason += f"; the run has gone back {self.rollbacks} times (guard.max_rollbacks)"
                raise SpikeFound(reason, taken=self._taken, skipped=skipped)
            if int(self._in_a_row) >= self.config.max_consecutive_skips > 1:
                reason += f"; {int(self._in_a_row)} steps in a row were skipped (guard.max_consecutive_skips)"
            if in_part:
                reason += "; other gradients have updated their weights within backward by then, so this state is not "
                reason += "saved: resume from the last checkpoint"
            raise StoppedByGuard(reason, taken=self._taken, skipped=skipped, in_part=in_part)
        return skipped

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint, as JSON values. Reading it waits for the device.

        Once the run is to stop, it has no window: a run that resumes from there begins a new one.
        """
        state: dict[str, Any] = {"rollbacks": self.rollbacks} if self.rollbacks else {}
        if self._stopped:
            return state
        if in_a_row := int(self._in_a_row):
            state["in_a_row"] = in_a_row
        if self.config.spike_sigma:
            filled = int(self._filled)
            state["window"] = self._window[:, self._window.shape[1] - filled :].tolist()
        return state


def rollbacks_of(records: Iterable[dict[str, Any]]) -> Iterator[Rollback]:
    """Yield the rollbacks among the records of skipped steps."""
    for record in records:
        with suppress(KeyError, TypeError):  # of a step that was only skipped
            yield Rollback(**record["rollback"])


def _describe(step: int, result: StepResult, reason: str, group: dist.ProcessGroup) -> SkippedStep:
    ranks: list[Any] = [None] * group.size()
    dist.all_gather_object(ranks, (result.micro_losses.tolist(), float(result.shard_grad_norm)), group=group)
    losses, norms = map(list, zip(*ranks, strict=True))
    return SkippedStep(step, reason, float(result.loss), float(result.grad_norm), losses, norms)


def _values(skipped: SkippedStep) -> str:
    return f"loss {skipped.loss:.4g}, grad_norm {skipped.grad_norm:.4g}"
