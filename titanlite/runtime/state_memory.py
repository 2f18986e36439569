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

    def allocate_parameters(self, parameters: Iterable[nn.Parameter]) -> dict[Tensor, Tensor]:
        """Return the tensors that become parameters, for those that are elsewhere."""
        return {}

    def allocate_moments(
        self, parameters: Iterable[nn.Parameter], dtype: torch.dtype
    ) -> dict[nn.Parameter, tuple[Tensor, Tensor]]:
        """Return both moments of parameters, zeros, where these are elsewhere."""
        return {}

    def allocate_average(
        self, parameters: Iterable[nn.Parameter], dtype: torch.dtype | None
    ) -> dict[nn.Parameter, Tensor]:
        """Return zeros for parameters, where the average is elsewhere. dtype: default: the parameters' own."""
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
