"""The optimizer's step within backward, parameter by parameter: gradients never exist all at once.

FSDP calls the hook of a parameter when its reduced gradient is in place, on the stream that reduced it, and later work
waits for that stream. No other parameter has a gradient then, so `optimizer.step()` updates this one only. States,
groups and learning rates are those of any other step.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from titanlite.optim.combined import update
from titanlite.optim.norm import gradient_norms
from titanlite.runtime.private_torch import fsdp_param_group, local_tensor, release_all_reduce_input


def is_not_finite(losses: Tensor) -> Tensor:
    return ~losses.isfinite().all()


class InBackward:
    """Updates the parameters of a model in each backward pass. A step has one micro-batch.

    All ranks know before backward whether the loss is finite: if not, nothing is updated. A gradient that is not finite
    is found when other parameters are updated already. This rank's part of it is skipped, all others are used.

    Args:
        model: as it is trained, with FSDP applied.
        optimizer: skips parameters without a gradient, as PyTorch's do, and does not communicate.
        should_skip: (losses, global) -> bool on the device: skip the updates of this backward pass.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        should_skip: Callable[[Tensor], Tensor] = is_not_finite,
    ) -> None:
        self._optimizer = optimizer
        self._should_skip = should_skip
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        groups = [fsdp_param_group(module) for module in model.modules() if isinstance(module, FSDPModule)]
        self._fsdp_groups = [group for group in groups if group is not None]
        self._skip: Tensor | None = None
        self._norms: dict[nn.Parameter, Tensor] = {}
        for parameter in self._parameters:
            parameter.register_post_accumulate_grad_hook(self._update)

    def begin(self, losses: Tensor, group: dist.ProcessGroup) -> None:
        """Decide between forward and backward whether to skip.

        Args:
            losses: this rank's part of the loss.
            group: every process that reads other data.
        """
        losses = losses.clone()
        dist.all_reduce(losses, group=group)
        self._skip = self._should_skip(losses)

    def end(self) -> dict[nn.Parameter, Tensor]:
        """Return the `gradient_norms` of this backward pass, in the order of the model's parameters."""
        norms, self._norms, self._skip = self._norms, {}, None
        return {parameter: norms[parameter] for parameter in self._parameters if parameter in norms}

    def _update(self, parameter: Tensor) -> None:
        assert isinstance(parameter, nn.Parameter)
        assert parameter.grad is not None
        assert self._skip is not None, "backward without `begin`"
        assert parameter not in self._norms, "a gradient came in parts"
        for group in self._fsdp_groups:  # those that are done; the others have not reduced anything yet
            release_all_reduce_input(group)
        [norm] = gradient_norms([local_tensor(parameter.grad)])
        self._norms[parameter] = norm
        update(self._optimizer, skip=self._skip.to(norm.device) | ~norm.isfinite().all())
        parameter.grad = None
