"""Own time of a rank in a step: the time in which it does not wait for other ranks.

Step times are equal on all ranks, because a fast rank waits in collectives for the slowest one. Own times differ.
"""

import math
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch

from titanlite.observer import StepObserver


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


class OwnTime(StepObserver):
    """Measurement of one step: time of the step without the waits that its observer's hook reports.

    Steps that are not measured cost next to nothing. Waits include copies to and from the buffers of collectives.
    """

    def __init__(self, device: torch.device) -> None:
        self._clock: _Clock = _StreamClock() if device.type == "cuda" else _HostClock()
        self._step: tuple[Any, Any] | None = None
        self._waits: list[tuple[Any, Any]] = []
        self._begin: Any = None
        self._is_waiting = False

    def begin(self) -> None:
        """Begin to measure a step, when its data is there."""
        self._step, self._waits, self._is_waiting = None, [], False
        self._begin = self._clock.now()

    def end(self) -> None:
        """End the step, before the host waits for the device."""
        self._step = None if self._begin is None else (self._begin, self._clock.now())
        self._begin = None

    def waiting(self) -> AbstractContextManager[None]:
        is_measured = self._begin is not None and not self._is_waiting
        return self._measure_wait() if is_measured else nullcontext()

    @contextmanager
    def _measure_wait(self) -> Iterator[None]:
        begin, self._is_waiting = self._clock.now(), True
        yield
        self._is_waiting = False
        self._waits.append((begin, self._clock.now()))

    def seconds(self) -> float:
        """Return the own time of the step that ended last; NaN if it was not measured. Call it when the device is done
        with the step."""
        if self._step is None:
            return math.nan
        return self._clock.seconds(*self._step) - sum(self._clock.seconds(*wait) for wait in self._waits)
