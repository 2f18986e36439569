"""The optimizer's step within backward, parameter by parameter: gradients never exist all at once.

FSDP calls a parameter's hook when the reduced gradient is in its place, on the stream that reduced it, and what comes
after backward waits for that stream. At that moment no other parameter has a gradient, so `optimizer.step()` updates
this one and nothing else: states, groups and learning rates are those of any other step.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from titanlite.optim import update
from titanlite.optim.norm import norms_of
from titanlite.runtime.private_torch import local_tensor


def is_not_finite(figures: Tensor) -> Tensor:
    return ~figures.isfinite().all()


class InBackward:
    """Updates a model in each backward pass; for one that has no other gradients, one micro-batch a step.

    A loss that is not finite is known before backward, to all ranks: nothing is updated. A gradient that is not finite
    is known when others have been used already: its part on this rank is not updated, and what else is, is.

    Args:
        model: as it is trained: sharded, if it is to be.
        optimizer: skips parameters without a gradient, as those of PyTorch do, and does not communicate.
        forbids: (figures of the loss, global) -> bool on the device, whether nothing is to be updated.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        forbids: Callable[[Tensor], Tensor] = is_not_finite,
    ) -> None:
        self._optimizer = optimizer
        self._forbids = forbids
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        units = [
            module._get_fsdp_state()._fsdp_param_group for module in model.modules() if isinstance(module, FSDPModule)
        ]
        self._units = [unit for unit in units if unit is not None]
        self._skip: Tensor | None = None
        self._norms: dict[nn.Parameter, Tensor] = {}
        for parameter in self._parameters:
            parameter.register_post_accumulate_grad_hook(self._update)

    def begin(self, figures: Tensor, group: dist.ProcessGroup) -> None:
        """Between forward and backward.

        Args:
            figures: this rank's part of the loss.
            group: every process that reads other data.
        """
        figures = figures.clone()
        dist.all_reduce(figures, group=group)
        self._skip = self._forbids(figures)

    def end(self) -> list[Tensor]:
        """After backward: `norms_of` all gradients, in the order of the model's parameters."""
        norms, self._norms, self._skip = self._norms, {}, None
        return [norms[parameter] for parameter in self._parameters if parameter in norms]

    def _update(self, parameter: Tensor) -> None:
        assert isinstance(parameter, nn.Parameter)
        assert parameter.grad is not None
        assert self._skip is not None, "backward without `begin`"
        assert parameter not in self._norms, "a gradient came in parts"
        self._free_reduced()
        [norm] = norms_of([local_tensor(parameter.grad)])
        self._norms[parameter] = norm
        update(self._optimizer, skip=self._skip.to(norm.device) | ~norm.isfinite().all())
        parameter.grad = None

    def _free_reduced(self) -> None:
        """FSDP keeps what was reduced over replicas until the end of backward, so that it is not given away while that
        goes on: which is all gradients. Of units that are done, a record of the stream does the same. (A unit has its
        own when its hooks have been called.)"""
        for unit in self._units:
            if (state := unit._all_reduce_state) is not None:
                if state.all_reduce_input.is_cuda:
                    state.all_reduce_input.record_stream(torch.cuda.current_stream())
                unit._all_reduce_state = None
