"""Memory of the states of training: parameters, the moments of the optimizer, and an average of the weights."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn


class StateMemory:
    """Memory as PyTorch allocates it. A technique may have another, in a subclass."""

    slices_updates = False
    """Whether the optimizer updates a slice at a time, and passes it to `changed`."""

    def zeros(
        self, category: str, like: Iterable[Tensor], dtype: torch.dtype | None = None, *, copies: int = 1
    ) -> dict[Tensor, list[Tensor]]:
        """Return tensors of zeros, sharded like each of some tensors, if a category of states is elsewhere.

        Args:
            category: parameters, optimizer (its moments) or average.
            dtype: default: those of the tensors.
            copies: number of zeros for each of them.
        """
        return {}

    def drop_after_use(self, model: nn.Module) -> None:
        """Let parameters leave memory whenever the (sharded) model has used them."""

    def changed(self, *tensors: Tensor) -> None:
        """Contiguous tensors have new values, and are not needed soon.

        Raises:
            RunError: something that changed before could not be written.
        """

    def flush(self) -> None:
        """Wait until all that has changed is written.

        Raises:
            RunError: it cannot be.
        """


class WeightAverage:
    """No average. A technique may have one, in a subclass."""

    tensors: Mapping[str, Tensor] = {}
    """State for checkpoints, by name. Because these are the tensors in use, a load writes into them."""

    def update(self, step: int, skip_reason: Tensor) -> None:
        """Take the weights at the end of a step into the average, if that is due.

        Args:
            skip_reason: 0 if the optimizer made its step. See `StepResult`.
        """

    def measured(self, measure: Callable[[], dict[str, Any] | None]) -> dict[str, Any]:
        """Return {average: what `measure` returns} with the average in place of the weights; nothing without either.
        The weights have the same bits afterwards."""
        return {}
