# pyright: reportUnknownMemberType=false
"""Marks in the queue of a device, and save overhead: how much longer the steps took until a save ended, not how long a
call took."""

import time
from collections import deque
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median

import torch

Mark = float | torch.cuda.Event
"""Seconds, or on a GPU an event in its queue."""


def mark(device: torch.device) -> Mark:
    """Return a mark of now. The host does not wait for the device."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def is_past(mark: Mark) -> bool:
    """Return whether the device has passed a mark."""
    return not isinstance(mark, torch.cuda.Event) or bool(mark.query())


def between(a: Mark, b: Mark) -> float:
    """Return the seconds between two marks of one device that are past."""
    if isinstance(a, torch.cuda.Event):
        assert isinstance(b, torch.cuda.Event)
        return a.elapsed_time(b) / 1e3
    assert not isinstance(b, torch.cuda.Event)
    return b - a


class SaveClock:
    """Clock with a mark at the end of each step."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._undisturbed: deque[tuple[Mark, Mark]] = deque(maxlen=20)
        self._last: Mark | None = None
        self._begin: Mark | None = None
        self._steps = 0
        self._gaps: list[tuple[Mark, Mark]] = []

    def step(self) -> None:
        """Mark the end of a step."""
        now = mark(self.device)
        if self._begin is not None:
            self._steps += 1
        elif self._last is not None:
            self._undisturbed.append((self._last, now))
        self._last = now

    @contextmanager
    def not_training(self) -> Generator[None]:
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
        assert self._begin is not None
        self._last = mark(self.device)
        overhead = SaveOverhead([*self._undisturbed], self._begin, self._last, self._steps, self._gaps)
        self._begin = None
        return overhead


@dataclass(frozen=True)
class SaveOverhead:
    """Marks of a save, from which its overhead follows once the device has passed them."""

    undisturbed: list[tuple[Mark, Mark]]
    begin: Mark
    end: Mark
    steps: int
    gaps: list[tuple[Mark, Mark]]

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
