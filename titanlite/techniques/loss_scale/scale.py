"""Dynamic loss scaling for float16 compute (arXiv:1710.03740), by the rule of torch.amp.GradScaler.

Small gradients would be 0 in float16. The loss is multiplied by a scale before backward, and gradients are divided by
it before their norm. The scale is halved at each overflow, and doubled after many steps without one. It is a tensor on
the device, from values that are the same on all ranks: the host never waits for it.

At a scale of 1, an overflow is no fault of the scale. Then `[guard]` decides, as for any gradient that is not finite.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from titanlite.guard import SkipReason
from titanlite.optim.norm import flat_views
from titanlite.runtime.private_torch.tensors import scale_in_place
from titanlite.step import Step

INITIAL_SCALE = 2.0**16
GROWTH_FACTOR, BACKOFF_FACTOR = 2.0, 0.5
GROWTH_INTERVAL = 2000
"""Steps without an overflow after which the scale grows."""


@dataclass(kw_only=True, eq=False)
class ScaledStep(Step):
    """Step whose loss is scaled. The state is that of the checkpoint that the run resumes from."""

    def resume(self, state: Mapping[str, Any]) -> None:
        state, device = state.get("loss_scale", {}), self.mesh.device_type
        self.scale = torch.tensor(state.get("value", INITIAL_SCALE), dtype=torch.float32, device=device)
        self._finite_steps = torch.tensor(state.get("finite_steps", 0), device=device)
        """Steps without an overflow since the scale changed."""

    def loss_factor(self, valid_tokens: Tensor, *, micro_batches: int) -> Tensor:
        """Return a factor of the loss of a micro-batch, scaled.

        The loss that is scaled is the mean over a micro-batch. So the range of float16 does not depend on how many
        micro-batches a step has, nor on how many ranks share them.
        """
        return super().loss_factor(valid_tokens, micro_batches=micro_batches) * (self.scale * micro_batches)

    def unscale(self, gradients: Sequence[Tensor], *, micro_batches: int) -> None:
        scale_in_place(flat_views(gradients), (self.scale * micro_batches).reciprocal().to(gradients[0].device))

    def metrics(self) -> dict[str, Tensor]:
        return {"loss_scale": self.scale}

    def ask(self, decide: Callable[..., Tensor], loss: Tensor, grad_norm: Tensor) -> Tensor:
        """Decide, and end the step. One that is skipped for another reason than the scale changes nothing."""
        skip_reason = decide(loss, grad_norm, loss.isfinite() & ~grad_norm.isfinite() & (self.scale > 1))
        overflows = skip_reason == SkipReason.OVERFLOW
        finite_steps = self._finite_steps + (skip_reason == SkipReason.TAKEN)
        grows = finite_steps == GROWTH_INTERVAL
        factor = torch.where(overflows, BACKOFF_FACTOR, torch.where(grows, GROWTH_FACTOR, 1.0))
        scaled = self.scale * factor
        self.scale = torch.where(scaled.isfinite(), scaled, self.scale)
        self._finite_steps = torch.where(overflows | grows, 0, finite_steps)
        return skip_reason

    def checkpoint_state(self) -> dict[str, Any]:
        return {"loss_scale": {"value": float(self.scale), "finite_steps": int(self._finite_steps)}}
