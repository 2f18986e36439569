"""Marks in the queue of a device, and save overhead: how much longer the steps took until a save ended, not how long a
call took."""

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch


def mark(device: torch.device) -> Any:
    """Return a mark of now: seconds, or on a GPU an event in its queue, for which the host does not wait."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def is_past(mark: Any) -> bool:
    """Return whether the device has passed a mark."""
    return isinstance(mark, float) or mark.query()


def between(a: Any, b: Any) -> float:
    """Return the seconds between two marks that are past."""
    return b - a if isinstance(a, float) else a.elapsed_time(b) / 1e3


class SaveClock:
    """Clock with a mark at the end of each step."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._undisturbed: deque[tuple[Any, Any]] = deque(maxlen=20)
        self._last: Any = None
        self._begin: Any = None
        self._steps = 0
        self._gaps: list[tuple[Any, Any]] = []

    def step(self) -> None:
        """Mark the end of a step."""
        now = mark(self.device)
        if self._begin is not None:
            self._steps += 1
        elif self._last is not None:
            self._undisturbed.append((self._last, now))
        self._last = now

    @contextmanager
    def not_training(self) -> Iterator[None]:
        """Exclude a block (a validation) from the steps and from the overhead."""
        start = mark(self.device)
        yield
        self._last = mark(self.device)
        self._gaps.append((start, self._last))

    def begin_save(self) -> None:
        """Begin a save: the steps from here to `end_save` are disturbed."""
        self._begin, self._steps, self._gaps = self._last or mark(self.device), 0, []

    def end_save(self) -> "SaveOverhead":
        """End a save, which ended during the last step, or now if training waited for it."""
        self._last = mark(self.device)
        blocking = SaveOverhead([*self._undisturbed], self._begin, self._last, self._steps, self._gaps)
        self._begin = None
        return blocking


@dataclass(frozen=True)
class SaveOverhead:
    """Marks of a save, from which its overhead follows once the device has passed them."""

    undisturbed: list[tuple[Any, Any]]
    begin: Any
    end: Any
    steps: int
    gaps: list[tuple[Any, Any]]

    def is_known(self) -> bool:
        return is_past(self.end)

    def seconds(self) -> float | None:
        """Return the time from begin to end, less that of as many undisturbed steps (their median).

        Values below 0 are noise. None if there was no step to compare with.
        """
        usual = [between(a, b) for a, b in self.undisturbed]
        if self.steps and not usual:
            return None
        gaps = sum(between(a, b) for a, b in self.gaps)
        return between(self.begin, self.end) - gaps - (self.steps * median(usual) if self.steps else 0.0)
