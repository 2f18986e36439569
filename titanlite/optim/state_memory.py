"""Memory of the states of training, parameters and the moments of the optimizer, that PyTorch does not allocate."""

from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor, nn


class StateMemory(Protocol):
    """What the optimizer, `materialize` and checkpoints ask of such memory; `techniques.offload.disk` has one."""

    slices_updates: bool
    """Whether the optimizer updates a slice at a time, and passes it to `changed`."""

    def zeros(
        self, category: str, like: Iterable[Tensor], dtype: torch.dtype | None = None, *, copies: int = 1
    ) -> dict[Tensor, list[Tensor]]:
        """Return tensors of zeros, sharded like each of some tensors; nothing for a category that is not in it.

        Args:
            category: parameters, optimizer (its moments) or average.
            dtype: default: those of the tensors.
            copies: number of zeros for each of them.
        """
        ...

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
