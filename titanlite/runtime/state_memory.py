"""Memory of the states of training: parameters, the moments of the optimizer, and an average of the weights."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn


class StateMemory:
    """Memory as PyTorch allocates it. A technique may have another, in a subclass."""

    slices_updates = False
    """Whether the optimizer updates a slice at a time, and passes it to `changed`."""
    pins = True
    """Whether FSDP may copy parameters in host memory to pinned memory."""

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
