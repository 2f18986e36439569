"""AdamW on the host while training goes on: a thread updates one FSDP unit after the other.

With clipping, or where a step may be skipped, no update can begin before the last gradient is there. So the updates run
beside the next step, in the order in which its forward pass uses the units, and FSDP waits for a unit before it gathers
its parameters. With updates in backward they begin there.

No bit depends on when a unit is updated, because AdamW updates each element by itself. Learning rates are those of the
moment at which an update is started. What reads parameters, gradients or states of the optimizer in another way than by
FSDP's gathering calls `finish` first.
"""

from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from titanlite.optim.combined import update
from titanlite.optim.rounding import SlicedAdamW
from titanlite.runtime.private_torch.fsdp import before_gathering, sharded_parameters, unit_of
from titanlite.runtime.private_torch.tensors import LocalAdamW, call_pre_hooks, local_tensor, part_of

Change = Callable[[Sequence[Tensor]], None]

DEVICES = {"cuda"}
"""Device types for which the host runs the optimizer in parallel. A CPU that computes the model has no spare cores."""


def host_updates(model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> "HostUpdates | None":
    """Return the thread that updates a model whose parameters are in host memory. None: training updates them itself,
    on a CPU, and with other optimizers than AdamW alone, which may communicate or compile.

    Args:
        model: parallelized, with memory.
        device: of training.
    """
    if device.type not in DEVICES or not isinstance(optimizer, LocalAdamW | SlicedAdamW):
        return None
    updates = HostUpdates(model, optimizer)
    trained = sum(len(group["params"]) for group in optimizer.param_groups)
    return updates if updates.count == trained else None  # all are sharded by FSDP


class HostUpdates:
    """A thread of the host that updates the FSDP units of a model, and what waits for it.

    An exception in the thread is raised where FSDP waits for the unit, and by each `finish` from then on.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._units: dict[Hashable, list[list[nn.Parameter]]] = {}
        """Trained parameters of each unit in each group of the optimizer. Units are in the order of forward."""
        self._updates: dict[Hashable, Future[None]] = {}
        """The last update of each unit."""
        self._thread = ThreadPoolExecutor(1, "update")
        for module in model.modules():
            if not isinstance(module, FSDPModule) or (unit := unit_of(module)) in self._units:
                continue
            members = {*sharded_parameters(module)}
            by_group = [[p for p in group["params"] if p in members] for group in optimizer.param_groups]
            if any(by_group):
                self._units[unit] = by_group
                before_gathering(module, partial(self.wait, module))
        self.count = sum(len(of_group) for by_group in self._units.values() for of_group in by_group)
        """Number of parameters."""

    def start(self, change: Change | None, *, skip: Tensor) -> None:
        """Start the step of the optimizer in all units. Each drops its gradients at its end.

        Args:
            change: changes the gradients of a unit in place, before they are used. None: they are used as they are.
            skip: see `optim.update`.
        """
        self.prepare()
        skip = skip.cpu()
        for unit in self._units:
            self._start(unit, change, skip)

    def prepare(self) -> None:
        """Wait until parameters and states may change, in the thread of training and on its stream."""
        self.finish()
        call_pre_hooks(self._optimizer)

    def start_unit(self, module: FSDPModule, *, skip: Tensor) -> None:
        """Start the step of the optimizer in one unit, after `prepare`.

        Args:
            skip: on the host.
        """
        self._start(unit_of(module), None, skip)

    def wait(self, module: FSDPModule) -> None:
        """Return when the unit of a module is updated."""
        if future := self._updates.get(unit_of(module)):
            future.result()

    def finish(self) -> None:
        """Return when all units are updated."""
        for future in self._updates.values():
            future.result()

    def _start(self, unit: Hashable, change: Change | None, skip: Tensor) -> None:
        self._updates[unit] = self._thread.submit(_update, part_of(self._optimizer, self._units[unit]), change, skip)


def _update(part: torch.optim.Optimizer, change: Change | None, skip: Tensor) -> None:
    gradients = [parameter.grad for group in part.param_groups for parameter in group["params"]]
    parts = [local_tensor(gradient) for gradient in gradients if gradient is not None]
    if change is not None and parts:
        change(parts)
    update(part, skip=skip)
    part.zero_grad()
