"""The step of an optimizer, which may be skipped on the device, and several optimizers that step as one."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from titanlite.runtime.private_torch.compiler import without_autograd_cache
from titanlite.runtime.private_torch.tensors import LocalAdamW, local_tensor, reads_found_inf, wrapped_tensors


def update(optimizer: torch.optim.Optimizer, *, skip: Tensor) -> None:
    """Make one optimizer step, or none where `skip` (a bool on the device) is true.

    Fused optimizers read a tensor, `found_inf`, which gradient scalers set for them. For others the host waits for the
    value of `skip`.
    """
    if reads_found_inf(optimizer):
        device = next(p for group in optimizer.param_groups for p in group["params"]).device  # with offload, the CPU
        optimizer.grad_scale = getattr(optimizer, "grad_scale", None)  # pyright: ignore[reportAttributeAccessIssue]
        optimizer.found_inf = skip.float().to(device)  # pyright: ignore[reportAttributeAccessIssue]
        optimizer.step()
        del optimizer.grad_scale, optimizer.found_inf  # pyright: ignore[reportAttributeAccessIssue]
    elif not skip:
        # torchao's optimizers compile their update. PyTorch's cache of traced code identifies a DTensor by its whole
        # shape, not by its local tensor: it would run the code of 8-bit moments on 4-bit moments.
        with without_autograd_cache():
            optimizer.step()


def scales_gradients(optimizer: torch.optim.Optimizer, factor: Tensor) -> bool:
    """Let the next `update` multiply the gradients by a factor, if its kernel does that while it reads them.

    PyTorch's fused AdamW on a GPU does. It divides by a scale, which for a factor below 1 may round the last bit
    otherwise than a product. CPUs keep their own pass over the gradients, and their bits.

    Returns:
        whether it will. Nothing has changed if not.
    """
    if not isinstance(optimizer, LocalAdamW) or not is_on_gpu(optimizer):
        return False
    optimizer.grad_scale = factor.reciprocal()  # pyright: ignore[reportAttributeAccessIssue]
    return True


def is_on_gpu(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the parameters are on a GPU; with offload, they are not."""
    return next(p for group in optimizer.param_groups for p in group["params"]).is_cuda


def optimizers_in(optimizer: torch.optim.Optimizer) -> Sequence[torch.optim.Optimizer]:
    """Return the optimizers that step as one: the optimizer itself unless it is a `CombinedOptimizer`."""
    return optimizer.optimizers if isinstance(optimizer, CombinedOptimizer) else [optimizer]


class CombinedOptimizer(torch.optim.Optimizer):
    """Several optimizers of different parameters as one, which shares their groups and states.

    Each one skips a step by itself, so that the host waits only for those that cannot read `found_inf`.
    """

    _step_supports_amp_scaling = True  # `reads_found_inf` reads it

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        super().__init__([group for optimizer in optimizers for group in optimizer.param_groups], {})
        self.optimizers = optimizers
        for optimizer in optimizers:
            self.state.update(optimizer.state)  # some classes fill their state in the constructor
            optimizer.state = self.state

    def step(self, closure: Callable[[], float] | None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        assert closure is None
        skip = getattr(self, "found_inf", None)
        for optimizer in self.optimizers:
            if not any(group["params"] for group in optimizer.param_groups):
                continue  # `StepInBackward` takes parameters out
            if skip is None:
                optimizer.step()
            else:
                update(optimizer, skip=skip != 0)


def zero_moments(parameter: nn.Parameter, *, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the state of AdamW before the first step.

    PyTorch makes it in the first update, in memory between gradients. Activations of later steps would have to fit
    around it, and the allocator would reserve more.
    """
    mean, square = (torch.zeros_like(parameter, dtype=dtype) for _ in range(2))
    return state_before_steps(parameter, mean, square)


def state_before_steps(parameter: nn.Parameter, mean: Tensor, square: Tensor) -> dict[str, Tensor]:
    """Return the state of AdamW with these moments, and a step count of 0 on the device of the parameter."""
    local = local_tensor(parameter)
    plain = next(iter(wrapped_tensors(local).values()), local)  # a tensor subclass may wrap the weights
    step = plain.new_zeros((), dtype=torch.float32)
    return {"step": step, "exp_avg": mean, "exp_avg_sq": square}
