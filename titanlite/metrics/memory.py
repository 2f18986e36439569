"""Memory of a run: by phase of a start and of its first steps (one record of rank 0, which has the largest shards), the
peak at each log step, and how often a GPU's allocator ran out of memory and tried again.

Every value is read by the host: nothing waits for the device. After the measured steps the hooks do nothing.
"""

import logging
import os
import resource
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from titanlite.observer import Phase, StepObserver
from titanlite.optim.state_size import local_bytes, local_state_bytes

logger = logging.getLogger(__name__)

STEPS = 2
"""Measured steps of a start. In the first, code is compiled, and many optimizers have no states yet."""
START = (Phase.MODEL, Phase.SHARDING, Phase.OPTIMIZER, Phase.CHECKPOINT_LOAD)
STEP = (Phase.DATA, Phase.TEACHER, Phase.FORWARD, Phase.BACKWARD, Phase.UPDATE)


class Memory(StepObserver):
    """Observer that measures memory at the end of each phase of `START`, and of `STEP` in the first steps.

    Each phase gets the bytes of live tensors by category, and what `now` returns. The parameters come from `label`, and
    the optimizer from `follow`; before that, both count 0.

    Args:
        measures_phases: whether this rank measures phases. Every rank has a peak, and allocator retries.
    """

    def __init__(self, device: torch.device, *, measures_phases: bool) -> None:
        self.device = device
        self.source = "allocator" if device.type == "cuda" else "process"
        """Source of `now`: PyTorch's allocator, or the memory of the whole process."""
        self._is_on = measures_phases
        self._name = Phase.START
        self._steps = 0
        self._parameters: list[Tensor] = []
        self._optimizer: torch.optim.Optimizer | None = None
        self._start: dict[str, dict[str, int]] = {}
        self._step: dict[str, dict[str, int]] = {}
        self._reserved = 0
        """Peak of reserved memory before it was last reset."""
        self._warned = 0

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
        if self._is_on:
            self._measure()
            self._name = name
            self.restart_peak()

    def take(self, *, last: bool) -> dict[str, Any] | None:
        """Return the record, once: after the last measured step. Its steps are those of the newest one.

        Args:
            last: no further step comes.
        """
        if not self._is_on or not (self._steps >= STEPS or last):
            return None
        self._measure()
        self._is_on, self._parameters, self._optimizer = False, [], None
        return {"source": self.source, "phases": {**self._start, **self._step}}

    def _measure(self) -> None:
        """Measure the end of the present phase. A phase that comes once a micro-batch keeps its highest peak."""
        if self._name not in START + STEP:
            return
        found = self._start if self._name in START else self._step
        states = self._optimizer.state.values() if self._optimizer else ()
        values = {
            "parameters": sum(map(local_bytes, self._parameters)),
            "gradients": sum(local_bytes(it.grad) for it in self._parameters),
            "optimizer": sum(map(local_state_bytes, states)),
            **self.now(),
        }
        if "peak" in values:
            values["peak"] = max(values["peak"], found.get(self._name, values)["peak"])
        found[self._name] = values

    def now(self) -> dict[str, int]:
        """Return bytes. On a GPU: `allocated` by tensors, their `peak` since `restart_peak`, and `reserved`. On CPU:
        `resident`, if the system reports it."""
        if self.device.type == "cuda":
            return {
                "allocated": torch.cuda.memory_allocated(self.device),
                "peak": torch.cuda.max_memory_allocated(self.device),
                "reserved": torch.cuda.memory_reserved(self.device),
            }
        try:
            pages = int(Path("/proc/self/statm").read_text().split()[1])
        except OSError:  # not Linux
            return {}
        return {"resident": pages * os.sysconf("SC_PAGE_SIZE")}

    def restart_peak(self) -> None:
        """Let the peak of `now` begin again. That of `peak` does not."""
        if self.device.type == "cuda":
            self._reserved = max(self._reserved, torch.cuda.max_memory_reserved(self.device))
            torch.cuda.reset_peak_memory_stats(self.device)

    def peak(self) -> float:
        """Return GiB: on a GPU, the most that PyTorch has reserved; on CPU, the most that the process had resident."""
        if self.device.type == "cuda":
            return max(self._reserved, torch.cuda.max_memory_reserved(self.device)) / 2**30
        unit = 1 if sys.platform == "darwin" else 2**10
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30

    def retries(self) -> int:
        """Return how often since the start an allocation failed, so that PyTorch freed its cache and tried again."""
        return torch.cuda.memory_stats(self.device)["num_alloc_retries"] if self.device.type == "cuda" else 0

    def warn(self, retries: int, *, step: int) -> None:
        """Log a warning if there are more allocator retries than at the last call.

        Args:
            retries: the largest number of any rank.
        """
        if retries > self._warned:
            logger.warning(
                f"memory: {retries - self._warned} allocator retries up to step {step}: GPU memory is nearly full, and "
                "each retry stops the GPU. Lower training.local_batch_size, or recompute more with "
                "activation_checkpoint.mode (docs/memory.md)"
            )
            self._warned = retries


def memory_line(record: dict[str, Any]) -> str:
    """Return one line for the log: tensors, and the largest peak, or the resident memory."""
    phases: dict[str, dict[str, int]] = record["phases"]
    most = {
        name: max(values.get(name, 0) for values in phases.values()) / 2**20
        for name in ("parameters", "gradients", "optimizer", "resident")
    }
    resident = most.pop("resident")
    parts = [f"{name} {size:,.1f}" for name, size in most.items()]
    if record["source"] == "allocator":
        peaks = [f"{name} {values['peak'] / 2**20:,.1f}" for name, values in phases.items() if name in STEP]
        parts.append(f"peaks of allocated memory in {', '.join(peaks)}")
    elif resident:
        parts.append(f"process resident {resident:,.1f}, libraries included")
    return f"memory   MiB of rank 0: {'; '.join(parts)}"
