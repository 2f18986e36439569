"""Averages of the trained weights over steps: exponential, or over the last snapshots.

Each rank averages its own shards, element by element, with operations that are rounded one by one. So an average has
the same bits on every layout on which the weights have.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from titanlite.models.base import trainable_parameters
from titanlite.ops.mean import rounded_once, weighted_mean
from titanlite.optim.state_memory import StateMemory
from titanlite.runtime.dtensor import own_part, unwrapped
from titanlite.runtime.private_torch.tensors import local_tensor
from titanlite.schema import Average


class WeightAverage(ABC):
    """An average of the trained parameters of a model. Buffers and frozen parameters have none.

    Args:
        memory: of the average, where that is elsewhere.
        changed: called whenever the weights were replaced.
        on_host: keep it in host memory.
    """

    tensors: Mapping[str, Tensor] = {}
    """State for checkpoints, by name. Because these are the tensors in use, a load writes into them."""

    def __init__(
        self,
        config: Average,
        model: nn.Module,
        memory: StateMemory | None,
        changed: Callable[[], None],
        *,
        on_host: bool,
    ) -> None:
        self._config = config
        self._memory = memory
        self._changed = changed
        self._parameters = trainable_parameters(model)
        self._device = torch.device("cpu") if on_host else next(iter(self._parameters.values())).device
        self._make()

    @abstractmethod
    def _make(self) -> None:
        """Make the tensors."""

    @abstractmethod
    def update(self, step: int, skip_reason: Tensor) -> None:
        """Take the weights at the end of a step into the average, if that is due.

        Args:
            skip_reason: 0 if the optimizer made its step. See `StepResult`.
        """

    def _zeros(self, prefix: str, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        """Return a tensor for each parameter, sharded like it, and put them among `tensors`."""
        weights = {name: unwrapped(parameter) for name, parameter in self._parameters.items()}
        elsewhere = self._memory.zeros("average", weights.values(), dtype) if self._memory else {}
        made = {
            name: elsewhere[weight][0]
            if weight in elsewhere
            else torch.zeros_like(weight, dtype=dtype, device=self._device)
            for name, weight in weights.items()
        }
        self.tensors = {**self.tensors, **{f"{prefix}.{name}": tensor for name, tensor in made.items()}}
        return {name: local_tensor(tensor) for name, tensor in made.items()}

    def _changed_memory(self, tensor: Tensor) -> None:
        if self._memory:
            self._memory.changed(tensor)

    @abstractmethod
    def value(self, name: str) -> Tensor:
        """Return this rank's part of the average of a parameter."""

    @torch.no_grad()
    def measured(self, measure: Callable[[], dict[str, Any] | None]) -> dict[str, Any]:
        """Return {average: what `measure` returns} with the average in place of the weights; nothing without either.
        The weights have the same bits afterwards."""
        if not int(self.tensors["updates"]):
            return {}
        weights = {name: own_part(parameter) for name, parameter in self._parameters.items()}
        kept = {name: weight.clone() for name, weight in weights.items()}
        try:
            for name, weight in weights.items():
                weight.copy_(self.value(name))
            self._changed()
            found = measure()
        finally:
            for name, weight in weights.items():
                weight.copy_(kept[name])
            self._changed()
        return {} if found is None else {"average": found}


class MovingAverage(WeightAverage):
    """Exponential moving average, in float32. The host does not wait for the device.

    The decay of the n-th update is at most (n - 1) / n, so that the first weights do not count more than others: the
    average is the plain mean until that many updates are made that 1 / n is below 1 - decay.
    """

    def _make(self) -> None:
        self._average = self._zeros("ema", torch.float32)
        self._updates = torch.zeros((), dtype=torch.int64, device=self._device)
        self.tensors = {**self.tensors, "updates": self._updates}

    @torch.no_grad()
    def update(self, step: int, skip_reason: Tensor) -> None:
        if step % self._config.freq:
            return
        is_taken = (skip_reason == 0).to(self._device)
        share = (self._updates + 1).double().reciprocal().clamp(min=1 - self._config.decay)
        share = (share * is_taken).float()
        self._updates += is_taken
        for name, parameter in self._parameters.items():
            average = self._average[name]
            difference = own_part(parameter).to(self._device, torch.float32) - average
            average += difference.mul_(share)
            self._changed_memory(average)

    def value(self, name: str) -> Tensor:
        return self._average[name]


class WindowAverage(WeightAverage):
    """Mean of the last snapshots, which have the dtype of the weights. The host waits for the device at a snapshot."""

    def _make(self) -> None:
        self._snapshots = [self._zeros(f"snapshot_{number}") for number in range(self._config.window)]
        self._updates = torch.zeros((), dtype=torch.int64)
        self.tensors = {**self.tensors, "updates": self._updates}

    @torch.no_grad()
    def update(self, step: int, skip_reason: Tensor) -> None:
        if step % self._config.freq or int(skip_reason):
            return
        snapshot = self._snapshots[int(self._updates) % len(self._snapshots)]
        for name, parameter in self._parameters.items():
            snapshot[name].copy_(own_part(parameter))
            self._changed_memory(snapshot[name])
        self._updates += 1

    def value(self, name: str) -> Tensor:
        taken = [snapshot[name] for snapshot in self._snapshots[: int(self._updates)]]
        return rounded_once(weighted_mean(taken, [1.0] * len(taken)), taken[0].dtype)
