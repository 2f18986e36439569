"""Memory by phase of a start and of its first steps: one record of rank 0, which has the largest shards.

Every value is read by the host: nothing waits for the device. After the measured steps the hooks do nothing.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from titanlite.metrics.memory_watch import MemoryWatch
from titanlite.observer import Phase, StepObserver
from titanlite.optim.state_size import local_bytes, local_state_bytes

STEPS = 2
"""Measured steps of a start. In the first, code is compiled, and many optimizers have no states yet."""
START = ("model", "sharding", "optimizer", "checkpoint load")
STEP = ("data", "teacher", "forward", "backward", "update")


class PhaseMemory(StepObserver):
    """Observer that measures memory at the end of each phase of `START`, and of `STEP` in the first steps.

    Each phase gets the bytes of live tensors by category, and what `MemoryWatch.now` returns. The parameters come from
    `label`, and the optimizer from `follow`; before that, both count 0.

    Args:
        watch: of the device.
        is_on: whether this rank measures.
    """

    def __init__(self, watch: MemoryWatch, *, is_on: bool = True) -> None:
        self.watch = watch
        self._is_on = is_on
        self._name = ""
        self._steps = 0
        self._parameters: list[Tensor] = []
        self._optimizer: torch.optim.Optimizer | None = None
        self._start: dict[str, dict[str, int]] = {}
        self._step: dict[str, dict[str, int]] = {}

    def follow(self, optimizer: torch.optim.Optimizer) -> None:
        """Count the states of an optimizer from here on."""
        self._optimizer = optimizer

    def label(self, tensors: Iterable[Tensor], category: str) -> None:
        if category == "parameters":
            self._parameters = [*tensors]

    def begin_step(self, step: int) -> None:
        if self._is_on:
            self.phase(Phase.DATA)
            self._steps += 1
            self._step = {}

    def phase(self, name: Phase) -> None:
        if not self._is_on:
            return
        self._measure()
        self._name = name
        self.watch.restart_peak()

    def take(self, *, last: bool) -> dict[str, Any] | None:
        """Return the record, once: after the last measured step. Its steps are those of the newest one.

        Args:
            last: no further step comes.
        """
        if not self._is_on or not (self._steps >= STEPS or last):
            return None
        self._measure()
        self._is_on, self._parameters, self._optimizer = False, [], None
        return {"source": self.watch.source, "phases": {**self._start, **self._step}}

    def _measure(self) -> None:
        """Measure the end of the present phase. A phase that comes once a micro-batch keeps its highest peak."""
        found = self._start if self._name in START else self._step
        if self._name in START + STEP:
            values = {**self._tensors(), **self.watch.now()}
            if "peak" in values:
                values["peak"] = max(values["peak"], found.get(self._name, values)["peak"])
            found[self._name] = values

    def _tensors(self) -> dict[str, int]:
        states = self._optimizer.state.values() if self._optimizer else ()
        return {
            "parameters": sum(map(local_bytes, self._parameters)),
            "gradients": sum(local_bytes(it.grad) for it in self._parameters),
            "optimizer": sum(map(local_state_bytes, states)),
        }


def memory_line(record: dict[str, Any]) -> str:
    """Return one line for the log: tensors, and the largest peak, or the resident memory."""
    phases: dict[str, dict[str, int]] = record["phases"]
    parts = [f"{name} {_most(phases, name) / 2**20:,.1f}" for name in ("parameters", "gradients", "optimizer")]
    if record["source"] == "allocator":
        peaks = [f"{name} {values['peak'] / 2**20:,.1f}" for name, values in phases.items() if name in STEP]
        parts.append(f"peaks of allocated memory in {', '.join(peaks)}")
    elif _most(phases, "resident"):
        parts.append(f"process resident {_most(phases, 'resident') / 2**20:,.1f}, libraries included")
    return f"memory   MiB of rank 0: {'; '.join(parts)}"


def _most(phases: dict[str, dict[str, int]], name: str) -> int:
    return max(values.get(name, 0) for values in phases.values())
