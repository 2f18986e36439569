"""Average of the weights over steps, beside the weights that are trained."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor


class WeightAverage:
    """No average. A technique may have one, in a subclass."""

    tensors: Mapping[str, Tensor] = {}
    """State for checkpoints, by name: the tensors in use, so that loading into them is all of loading."""

    def update(self, step: int, skip_reason: Tensor) -> None:
        """Take the weights at the end of a step into the average, if that is due.

        Args:
            skip_reason: 0 if the optimizer made its step. See `StepResult`.
        """

    def measured(self, measure: Callable[[], dict[str, Any] | None]) -> dict[str, Any]:
        """Return {average: what `measure` returns} with the average in place of the weights; nothing without either.
        The weights have the same bits afterwards."""
        return {}
