"""AdamW (arXiv:1711.05101) with weights and moments in float32 or bfloat16, in memory or elsewhere.

PyTorch's operators update a slice at a time. On GPUs with Triton, one kernel updates a whole tensor.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from titanlite.ops.hash_random import random_bits, salt
from titanlite.optim.combined import state_before_steps, zero_moments
from titanlite.optim.state_memory import StateMemory
from titanlite.runtime.dtensor import GlobalIndices
from titanlite.runtime.private_torch.tensors import add_in_place, fused_adamw_, local_tensor

logger = logging.getLogger(__name__)

SLICE = 2**24
"""Elements that `SlicedAdamW` updates at a time. Its memory beside the state is a few times this."""
SMALL_SLICE = 2**21
"""The same where `StateMemory.slices_updates`, so that little of each moment is in memory. A multiple of what a kernel
computes at once, so that results do not depend on it."""
VECTOR = 64
"""Elements of which the kernel of CPUs computes a multiple in vectors. It rounds those after them differently, and
which they are depends on how a tensor is sharded."""


UpdateKernel = Callable[..., None]
"""Update of one tensor in one launch: `rounding_kernel.update`, which describes the arguments."""


class SlicedAdamW(torch.optim.Optimizer):
    """AdamW on weights and moments that may be bfloat16, or on another device than the gradients.

    It computes in float32 where the gradient is, and rounds bfloat16 results stochastically.
    Rounding to nearest would lose every update below 1/512 of a value. Rounding up with the probability of what would
    be lost keeps updates right on average (arXiv:2010.06192). The random bits are a hash of (seed, name, step, index
    in the whole tensor): the same on every layout and after a resume.

    Args:
        parameters: all of them, by name; sharded in any way.
        state_dtype: dtype of the two moments.
        memory: of weights and moments. Default: as PyTorch allocates it.
        kernel: updates tensors whose part on this rank is one run of elements of the whole tensor. None: PyTorch's
            operators update slices.
    """

    _step_supports_amp_scaling = True  # `reads_found_inf` reads it

    def __init__(
        self,
        groups: list[dict[str, Any]],
        parameters: Mapping[str, nn.Parameter],
        *,
        state_dtype: torch.dtype,
        seed: int,
        memory: StateMemory | None = None,
        kernel: UpdateKernel | None = None,
        **options: Any,
    ) -> None:
        super().__init__(groups, options)
        self.state_dtype = state_dtype
        self.kernel = kernel
        self.round = round_stochastically
        """Rounding of float32 values to bfloat16, given random bits."""
        self._origins = {p: (salt(f"{seed}/{name}"), GlobalIndices(p)) for name, p in parameters.items()}
        self._memory = memory
        elsewhere = memory.zeros("optimizer", parameters.values(), state_dtype, copies=2) if memory else {}
        for p in parameters.values():
            moments = elsewhere.get(p)
            self.state[p] = state_before_steps(p, *moments) if moments else zero_moments(p, dtype=state_dtype)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        assert closure is None
        skip = getattr(self, "found_inf", None)
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            by_kernel = [parameter for parameter in parameters if self._is_for_kernel(parameter)]
            if self.kernel and by_kernel:
                self._update_by_kernel(self.kernel, by_kernel, group, skip)
            for parameter in parameters:
                if not self._is_for_kernel(parameter):
                    self._update(parameter, group, skip)

    def _is_for_kernel(self, parameter: nn.Parameter) -> bool:
        return self.kernel is not None and self._origins[parameter][1].first is not None

    def _update_by_kernel(
        self, kernel: UpdateKernel, parameters: Sequence[nn.Parameter], group: dict[str, Any], skip: Tensor | None
    ) -> None:
        """Update parameters of a group, in one launch each. The scalars of all are computed together."""
        steps = [self.state[parameter]["step"] for parameter in parameters]
        step = torch.stack(steps) + 1
        beta1, beta2 = group["betas"]
        corrections = torch.stack([step, 1 - beta1**step, (1 - beta2**step).sqrt()])
        skip = torch.zeros_like(step[0]) if skip is None else skip
        for number, parameter in enumerate(parameters):
            name_salt, indices = self._origins[parameter]
            assert indices.first is not None
            kernel(
                *self._flat(parameter), corrections=corrections, number=number, skip=skip, salt=name_salt,
                first=indices.first, lr=group["lr"], betas=group["betas"], eps=group["eps"],
                weight_decay=group["weight_decay"],
            )  # fmt: skip
        add_in_place(steps, 1 - skip)

    def _flat(self, parameter: nn.Parameter) -> list[Tensor]:
        """Return this rank's part of a weight, its gradient and its moments, each with one dimension."""
        state = self.state[parameter]
        assert parameter.grad is not None
        tensors = (parameter, parameter.grad, state["exp_avg"], state["exp_avg_sq"])
        return [local_tensor(tensor).view(-1) for tensor in tensors]

    def _update(self, parameter: nn.Parameter, group: dict[str, Any], skip: Tensor | None) -> None:
        state = self.state[parameter]
        state["step"] += 1
        flat = self._flat(parameter)
        name_salt, indices = self._origins[parameter]
        size = SMALL_SLICE if self._memory and self._memory.slices_updates else SLICE
        for start in range(0, len(flat[0]), size):
            weight, gradient, mean, square = kept = [tensor[start : start + size] for tensor in flat]
            on_device = [part.to(gradient.device).float() for part in kept]
            rounds = any(part.dtype != torch.float32 for part in (weight, mean, square))
            if rounds and (rest := -len(gradient) % VECTOR):
                on_device = [nn.functional.pad(tensor, (0, rest)) for tensor in on_device]
            fused_adamw_(
                *on_device, step=state["step"], lr=group["lr"], betas=group["betas"], eps=group["eps"],
                weight_decay=group["weight_decay"], found_inf=skip,
            )  # fmt: skip
            del on_device[1]
            here = indices(start, len(gradient), gradient.device) if rounds else None
            bits = None if here is None else random_bits(state["step"].long() + name_salt, here)
            for number, (part, new) in enumerate(zip((weight, mean, square), on_device, strict=True)):
                if bits is not None and part.dtype != torch.float32:
                    part.copy_(self.round(new[: len(part)], bits >> (16 * number)))
                elif part is not new:  # it is on another device, or padded
                    part.copy_(new[: len(part)])
            if self._memory:
                self._memory.changed(weight, mean, square)
        if skip is not None:
            state["step"] -= skip


def pick_kernel(device: torch.device) -> UpdateKernel | None:
    """Return the Triton kernel where it starts: on GPUs, with Triton and the C compiler that Triton needs."""
    if device.type != "cuda" or find_spec("triton") is None:
        return None
    from titanlite.optim.rounding_kernel import try_update, update

    try:
        try_update(device)
    except Exception as error:  # Triton, the compiler or the driver fails; PyTorch's operators need none of them
        reason = " ".join(str(error).split())
        logger.warning("Triton does not start, so that bfloat16 states take about 70 launches a tensor: %s", reason)
        return None
    return update


def round_stochastically(values: Tensor, bits: Tensor) -> Tensor:
    """Round float32 to bfloat16: to a neighbour with the probability of how near it is.

    Args:
        bits: int64; the lowest 16 bits are random.
    """
    # bfloat16 is the upper half of float32. A random number added to the lower half carries over as often as it should.
    raised = values.view(torch.int32) + (bits & 0xFFFF).to(torch.int32)
    rounded = (raised & -0x10000).view(torch.float32)
    return torch.where(values.isfinite(), rounded, values).to(torch.bfloat16)
