"""Own time of a rank in a step: the time of a part in which it does not wait for other ranks.

Step times are equal on all ranks, because a fast rank waits in collectives for the slowest one. Own times differ.
"""

import math
import time
from typing import Any, Protocol

import torch
from torch import Tensor, nn

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
    """Measurement of one step: time of the head, the loss and their backward pass, in which no rank waits for another.

    It begins when FSDP has gathered the head, and ends before FSDP reduces the head's gradient. It is summed over the
    micro-batches. Steps that are not measured cost next to nothing.
    """

    def __init__(self, device: torch.device) -> None:
        self._clock: _Clock = _StreamClock() if device.type == "cuda" else _HostClock()
        self._spans: list[tuple[Any, Any]] = []
        self._is_measured = False

    def follow(self, model: nn.Module) -> None:
        """Measure the steps of a model, after FSDP is applied to it."""
        head_of(model).register_forward_pre_hook(self._begin_head)

    def begin(self) -> None:
        """Begin to measure a step, when its data is there."""
        self._spans, self._is_measured = [], True

    def end(self) -> None:
        """End the step, before the host waits for the device."""
        self._is_measured = False

    def _begin_head(self, _: nn.Module, arguments: tuple[Any, ...]) -> None:
        hidden = arguments[0]
        if not self._is_measured or not hidden.requires_grad:
            return
        begin = self._clock.now()

        def end(gradient: Tensor) -> None:
            self._spans.append((begin, self._clock.now()))

        hidden.register_hook(end)

    def seconds(self) -> float:
        """Return the time of the step that ended last; NaN if it was not measured. Call it when the device is done with
        the step."""
        return sum(self._clock.seconds(*span) for span in self._spans) if self._spans else math.nan
