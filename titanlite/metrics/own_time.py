"""Own time of a rank in a step: the time of a part in which it does not wait for other ranks.

Step times are equal on all ranks, because a fast rank waits in collectives for the slowest one. Own times differ.
"""

import math
import time
from typing import Any, Protocol

import torch
from torch import nn

from titanlite.models.base import head_of


class _Clock(Protocol):
    def now(self) -> Any:
        """Return the present time, in a form that `seconds` knows."""

    def seconds(self, begin: Any, end: Any) -> float:
        """Return the seconds between two times; NaN if they are not known."""
        ...


class _HostClock:
    def now(self) -> float:
        return time.perf_counter()

    def seconds(self, begin: float, end: float) -> float:
        return end - begin


class _StreamClock:
    """Clock of the current CUDA stream: its times are events. The host never waits for them."""

    def now(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return begin.elapsed_time(end) / 1e3 if begin.query() and end.query() else math.nan


class OwnTime:
    """Measurement of one step: time of the head and the loss in forward, in which no rank waits for another.

    It begins when FSDP has gathered the head. It is summed over the micro-batches. Steps that are not measured cost
    next to nothing.
    """

    def __init__(self, device: torch.device) -> None:
        self._clock: _Clock = _StreamClock() if device.type == "cuda" else _HostClock()
        self._begins: list[Any] = []
        self._ends: list[Any] = []
        self._is_measured = False

    def follow(self, model: nn.Module) -> None:
        """Measure the steps of a model, after FSDP is applied to it."""
        head = head_of(model)
        head.register_forward_pre_hook(lambda *_: self._note(self._begins))
        head.register_forward_hook(lambda *_: self._note(self._ends))

    def begin(self) -> None:
        """Begin to measure a step, when its data is there."""
        self._begins, self._ends, self._is_measured = [], [], True

    def end(self) -> None:
        """End the step, before the host waits for the device."""
        self._is_measured = False

    def _note(self, times: list[Any]) -> None:
        if self._is_measured:
            times.append(self._clock.now())

    def seconds(self) -> float:
        """Return the time of the step that was measured last; NaN if none was. Call it when the device is done with the
        step."""
        spans = zip(self._begins, self._ends, strict=True)
        return sum(self._clock.seconds(*span) for span in spans) if self._ends else math.nan
