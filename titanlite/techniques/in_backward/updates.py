"""The optimizer's step within backward, one FSDP unit at a time: gradients never exist all at once.

FSDP calls the hook of a parameter when its reduced gradient is in place, on the stream that reduced it, and later work
waits for that stream. The gradients of a unit share their memory, and arrive together: the last one's hook updates the
unit. States, groups and learning rates are those of any other step. In host memory, a thread updates one unit while
backward computes the next.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from titanlite.optim.combined import update
from titanlite.optim.norm import gradient_norms
from titanlite.runtime.private_torch.fsdp import release_all_reduce_input, sharded_parameters
from titanlite.runtime.private_torch.tensors import local_tensor
from titanlite.step import Step


@dataclass(eq=False)
class _Unit:
    """Parameters that are reduced, and so updated, together."""

    parameters: list[nn.Parameter]
    by_group: list[list[nn.Parameter]]
    """Members of each group of the optimizer, in the order of the groups."""
    module: FSDPModule | None
    """Module whose parameters they are. None: FSDP does not shard the parameter."""
    arrived: int = 0
    """Number of gradients that are there and not used yet."""


@dataclass(kw_only=True, eq=False)
class StepInBackward(Step):
    """Step that updates the parameters of a model in its one backward pass.

    All ranks know before backward whether the loss is finite: if not, nothing is updated. A gradient that is not finite
    is found when other FSDP units are updated already. This rank's part of its unit is skipped, all others are used.

    The optimizer skips parameters without a gradient, as PyTorch's do, and does not communicate.
    """

    def __post_init__(self, state: Mapping[str, Any]) -> None:
        super().__post_init__(state)
        self._parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        units = _units(self.model, self.optimizer)
        self._unit_of = {parameter: unit for unit in units for parameter in unit.parameters}
        self._reducing: _Unit | None = None
        """Unit whose gradients arrived last."""
        self._updating: FSDPModule | None = None
        """Unit that the thread of `updates` has got last."""
        self._skip: Tensor | None = None
        self._norms: dict[nn.Parameter, Tensor] = {}
        for parameter in self._parameters:
            parameter.register_post_accumulate_grad_hook(self._arrive)

    def before_backward(self, losses: Tensor) -> None:
        if self.updates is not None:
            self.updates.prepare()
        losses = losses.clone()
        dist.all_reduce(losses, group=self.group)
        self._skip = self.should_skip(losses)

    def norms(self, parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor]) -> dict[nn.Parameter, Tensor]:
        """Return the `gradient_norms` of this backward pass, in the order of the model's parameters."""
        for unit in {self._unit_of[parameter]: None for parameter in self._parameters}:
            if unit.arrived:  # the others of the unit had no gradient in this backward pass
                self._update(unit)
        norms, self._norms, self._skip, self._reducing = self._norms, {}, None, None
        return {parameter: norms[parameter] for parameter in self._parameters if parameter in norms}

    def update(self, gradients: Sequence[Tensor], *, norm: Tensor, skip: Tensor) -> None:
        """Do nothing: backward made the step."""

    def _arrive(self, parameter: Tensor) -> None:
        assert isinstance(parameter, nn.Parameter)
        assert self._skip is not None, "backward without a loss"
        assert parameter not in self._norms, "a gradient came in parts"
        unit = self._unit_of[parameter]
        if unit is not self._reducing:
            if self._reducing is not None and self._reducing.module is not None:
                release_all_reduce_input(self._reducing.module)
            self._reducing = unit
        unit.arrived += 1
        if unit.arrived == len(unit.parameters):
            self._update(unit)

    def _update(self, unit: _Unit) -> None:
        assert self._skip is not None
        unit.arrived = 0
        parameters = [parameter for parameter in unit.parameters if parameter.grad is not None]
        norms = gradient_norms([local_tensor(parameter.grad) for parameter in parameters if parameter.grad is not None])
        self._norms.update(zip(parameters, norms, strict=True))
        is_finite = torch.cat([norm.flatten() for norm in norms]).isfinite().all()
        skip = self._skip.to(is_finite.device) | ~is_finite
        if self.updates is not None:
            if self._updating is not None:
                self.updates.wait(self._updating)  # so that gradients of two units exist
            assert unit.module is not None
            self.updates.start_unit(unit.module, skip=skip)
            self._updating = unit.module
            return
        with _only(self.optimizer, unit.by_group):
            update(self.optimizer, skip=skip)
        for parameter in parameters:
            parameter.grad = None


def _units(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[_Unit]:
    """Return the trained parameters by FSDP unit; a parameter that FSDP does not shard is a unit of its own."""
    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
    found: list[tuple[list[nn.Parameter], FSDPModule | None]] = [
        (sharded_parameters(module), module) for module in sharded
    ]
    in_fsdp = {parameter for parameters, _ in found for parameter in parameters}
    found += [([parameter], None) for parameter in model.parameters() if parameter not in in_fsdp]
    units = []
    for parameters, module in found:
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        members = set(trained)
        by_group = [[p for p in group["params"] if p in members] for group in optimizer.param_groups]
        units += [_Unit(trained, by_group, module)] if trained else []
    return units


@contextmanager
def _only(optimizer: torch.optim.Optimizer, by_group: Sequence[list[nn.Parameter]]) -> Iterator[None]:
    """Let the groups of an optimizer have only some of their parameters, so that a step does not visit the others."""
    whole = [group["params"] for group in optimizer.param_groups]
    try:
        for group, some in zip(optimizer.param_groups, by_group, strict=True):
            group["params"] = some
        yield
    finally:
        for group, parameters in zip(optimizer.param_groups, whole, strict=True):
            group["params"] = parameters
