"""Time of a run by phase: where its hours went, how long a step takes, and how long without waits for other ranks."""

import math
from typing import Any

import torch
from torch import nn

from titanlite.checkpoint.save_overhead import between, is_past, mark
from titanlite.metrics.durations import by_category
from titanlite.models.base import head_of
from titanlite.observer import CurrentPhase, Phase
from titanlite.runtime.private_torch.compiler import compile_seconds


def phase_seconds(phase: CurrentPhase) -> dict[str, float]:
    """Return the seconds of this start so far in each of `CATEGORIES`, on this rank."""
    return by_category(phase.seconds(), compiling=compile_seconds() - phase.compiled_before)


class StepClock:
    """Times of the steps since the last record, without validation, saves and traces.

    A rank's own time is that of a part of a step in which it waits for no other rank: the head and the loss in forward,
    after FSDP has gathered the head, summed over the micro-batches. Step times are equal on all ranks, because a fast
    rank waits in collectives for the slowest one. Own time is measured in the steps that `begin` names, by events on a
    GPU's stream. The host does not wait.
    """

    def __init__(self, phase: CurrentPhase, device: torch.device) -> None:
        self._phase, self._device = phase, device
        self._begins: list[Any] = []
        """Beginnings of own time: seconds, or events."""
        self._ends: list[Any] = []
        self._is_measured = False
        self.restart()

    def follow(self, model: nn.Module) -> None:
        """Measure the own time of a model's steps, after FSDP is applied to it."""
        head = head_of(model)
        head.register_forward_pre_hook(lambda *_: self._note(self._begins))
        head.register_forward_hook(lambda *_: self._note(self._ends))

    def restart(self) -> None:
        """Begin a new window."""
        self.steps = 0
        self.data_wait = 0.0
        """Seconds of waiting for data."""
        self._before = self._phase.seconds()

    def elapsed(self) -> float:
        """Return the seconds of all steps in the window."""
        spent = self._phase.seconds()
        steps = [phase for phase in spent if phase.timeout == "step" and phase is not Phase.PROFILING]
        return sum(spent[phase] - self._before.get(phase, 0) for phase in steps)

    def begin(self, *, is_measured: bool) -> None:
        """Begin a step, when its data is there."""
        self.data_wait += self._phase.since()
        self._is_measured = is_measured
        if is_measured:
            self._begins, self._ends = [], []

    def _note(self, times: list[Any]) -> None:
        if self._is_measured:
            times.append(mark(self._device))

    def own_seconds(self) -> float:
        """End the measured step, and return its own time; NaN if it was not measured. Call it when the device is done
        with the step."""
        self._is_measured = False
        if len(self._begins) != len(self._ends):  # a forward that raised, such as a recomputation that stops early
            return math.nan
        spans = list(zip(self._begins, self._ends, strict=True))
        if not spans or not all(is_past(begin) and is_past(end) for begin, end in spans):
            return math.nan
        return sum(between(begin, end) for begin, end in spans)
