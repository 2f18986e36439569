"""Steps that must not be taken: a loss or a gradient that is not finite, and (if asked for) spikes.

Whether a step is taken is decided on the device, from figures that are the same on all ranks, and the optimizer is told
by a tensor: the host never waits for it. The host looks at log steps and before a checkpoint is saved. If the run is to
stop, nothing is updated from the decision on, so that weights and optimizer are still those of before it.

With `optimizer.in_backward` that is true of the loss only: when a gradient turns out not to be finite, others have been
used. Then the state is neither that of before the step nor that of after it, and must not be saved.
"""

import logging
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from titanlite.config.schema import Guard
from titanlite.runtime.errors import RunStopped
from titanlite.step import StepResult

logger = logging.getLogger(__name__)


class SkipReason(IntEnum):
    TAKEN = 0
    NONFINITE = 1
    SPIKE = 2
    AFTER_STOP = 3


REASONS = {SkipReason.NONFINITE: "loss or gradient is not finite", SkipReason.SPIKE: "loss or gradient spike"}


@dataclass(frozen=True)
class SkippedStep:
    """A step that was not taken."""

    step: int
    reason: str
    loss: float
    grad_norm: float
    micro_losses: list[list[float]]
    """Of each rank, of each of its micro-batches: its part of the loss."""
    shard_grad_norms: list[float]
    """Of each rank: the norm of its part of the gradient. Every rank's loss has gone into it."""


class StoppedByGuard(RunStopped):
    """Every rank raises it at the same step.

    Args:
        taken: the last step that was taken; weights and optimizer are those of its end.
        skipped: the steps since the guard was looked at before.
        in_part: the last of them was taken in part, and the state is of no step.
    """

    def __init__(self, message: str, *, taken: int, skipped: list[SkippedStep], in_part: bool = False) -> None:
        super().__init__(message)
        self.taken = taken
        self.skipped = skipped
        self.in_part = in_part


class StepGuard:
    """Args:
    step: the step that the run goes on from.
    state: of the checkpoint that it goes on from.
    """

    def __init__(self, config: Guard, *, device: torch.device, step: int, state: dict[str, Any]) -> None:
        self.config = config
        window = torch.tensor(state.get("window", [[], []]), dtype=torch.float32, device=device)[
            :, -config.spike_window :
        ]
        filled = window.shape[1]
        self._window = torch.nn.functional.pad(window, (config.spike_window - filled, 0))
        """Loss and gradient norm of the last finite steps, newest last."""
        self._filled = torch.tensor(filled, device=device)
        self._in_a_row = torch.tensor(state.get("in_a_row", 0), device=device)
        self._stopped = torch.tensor(False, device=device)
        self._began = torch.tensor(False, device=device)
        """This step's backward updates."""
        self._in_part = torch.tensor(False, device=device)
        self._taken = step - state.get("in_a_row", 0)
        self._since_look: list[tuple[int, StepResult]] = []

    def forbids(self, figures: Tensor) -> Tensor:
        """On the device: whether a backward that updates is to update nothing.

        Args:
            figures: of the loss of the global batch; the same bits on all ranks.
        """
        self._began = figures.isfinite().all() & ~self._stopped
        return ~self._began

    def judge(self, loss: Tensor, grad_norm: Tensor) -> Tensor:
        """On the device: the skip_reason, as a scalar.

        Args:
            loss, grad_norm: of the global batch; the same bits on all ranks.
        """
        figures = torch.stack([loss, grad_norm])
        finite = figures.isfinite().all()
        self._in_part = self._in_part | (self._began & ~finite)
        spike = self._is_spike(figures, finite) if self.config.spike_sigma else torch.zeros_like(finite)
        skip_reason = torch.where(finite, spike * SkipReason.SPIKE, SkipReason.NONFINITE)
        skip_reason = torch.where(self._stopped, SkipReason.AFTER_STOP, skip_reason)
        in_a_row = torch.where(skip_reason == SkipReason.TAKEN, 0, self._in_a_row + 1)
        self._in_a_row = torch.where(self._stopped, self._in_a_row, in_a_row)
        self._stopped = self._stopped | (self._in_a_row >= self.config.max_consecutive_skips)
        if self.config.nonfinite == "stop":
            self._stopped = self._stopped | ~finite
        return skip_reason

    def _is_spike(self, figures: Tensor, finite: Tensor) -> Tensor:
        """OLMo-core's rule: more than sigma standard deviations above the mean of the window. The window moves on with
        every finite step, so that a lasting change is no spike for long."""
        size = self.config.spike_window
        counts = torch.arange(size, device=figures.device) >= size - self._filled
        n = self._filled.clamp(min=1)
        mean = (self._window * counts).sum(dim=1) / n
        deviation = (((self._window - mean[:, None]) * counts).square().sum(dim=1) / (n - 1).clamp(min=1)).sqrt()
        above = (figures > mean + self.config.spike_sigma * deviation).any() & (self._filled >= size // 2)
        self._window = torch.where(finite, torch.cat([self._window[:, 1:], figures[:, None]], dim=1), self._window)
        self._filled = torch.where(finite, (self._filled + 1).clamp(max=size), self._filled)
        return above

    def keep(self, step: int, result: StepResult) -> None:
        """On the host, after each step: for the next look."""
        self._since_look.append((step, result))

    def look(self, group: dist.ProcessGroup) -> list[SkippedStep]:
        """Wait for the device, and read the skip_reasons since the last look. On every rank at the same steps.

        Raises:
            StoppedByGuard: the run must stop.
        """
        steps, self._since_look = self._since_look, []
        if not steps:
            return []
        skip_reasons = torch.stack([result.skip_reason for _, result in steps]).tolist()
        skipped: list[SkippedStep] = []
        in_part = bool(self._in_part)
        for (step, result), skip_reason in zip(steps, skip_reasons, strict=True):
            if skip_reason == SkipReason.TAKEN:
                self._taken = step
            elif skip_reason in REASONS:
                skipped.append(_describe(step, result, REASONS[SkipReason(skip_reason)], group))
                if dist.get_rank(group) == 0:
                    how = "was taken in part" if in_part else "was left out"
                    logger.warning(f"step {step} {how}: {skipped[-1].reason} ({_figures(skipped[-1])})")
        if bool(self._stopped):
            last = skipped[-1]
            reason = f"step {last.step}: {last.reason} ({_figures(last)})"
            if int(self._in_a_row) >= self.config.max_consecutive_skips > 1:
                reason += f"; {int(self._in_a_row)} steps in a row were left out (guard.max_consecutive_skips)"
            if in_part:
                reason += (
                    "; other gradients are in the weights by then (optimizer.in_backward), so that this state is not "
                )
                reason += "saved: go on from the last checkpoint"
            raise StoppedByGuard(reason, taken=self._taken, skipped=skipped, in_part=in_part)
        return skipped

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps; anything that JSON can hold. Waits for the device. Nothing, once the run is to stop:
        who goes on from there begins a new window."""
        state: dict[str, Any] = {}
        if self._stopped:
            return state
        if in_a_row := int(self._in_a_row):
            state["in_a_row"] = in_a_row
        if self.config.spike_sigma:
            filled = int(self._filled)
            state["window"] = self._window[:, self._window.shape[1] - filled :].tolist()
        return state


def _describe(step: int, result: StepResult, reason: str, group: dist.ProcessGroup) -> SkippedStep:
    ranks: list[Any] = [None] * group.size()
    dist.all_gather_object(ranks, (result.micro_losses.tolist(), float(result.shard_grad_norm)), group=group)
    losses, norms = map(list, zip(*ranks, strict=True))
    return SkippedStep(step, reason, float(result.loss), float(result.grad_norm), losses, norms)


def _figures(skipped: SkippedStep) -> str:
    return f"loss {skipped.loss:.4g}, grad_norm {skipped.grad_norm:.4g}"
