"""Save overhead: how much longer the steps took until a save ended, not how long a call took."""

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch


class StepClock:
    """Clock with a mark at the end of each step. On a GPU, marks are events in its queue: the host does not wait."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._undisturbed: deque[tuple[Any, Any]] = deque(maxlen=20)
        self._last: Any = None
        self._begin: Any = None
        self._steps = 0
        self._gaps: list[tuple[Any, Any]] = []

    def step(self) -> None:
        """Mark the end of a step."""
        mark = self._mark()
        if self._begin is not None:
            self._steps += 1
        elif self._last is not None:
            self._undisturbed.append((self._last, mark))
        self._last = mark

    @contextmanager
    def not_training(self) -> Iterator[None]:
        """Exclude a block (a validation) from the steps and from the overhead."""
        start = self._mark()
        yield
        self._last = self._mark()
        self._gaps.append((start, self._last))

    def begin_save(self) -> None:
        """Begin a save: the steps from here to `end_save` are disturbed."""
        self._begin, self._steps, self._gaps = self._last or self._mark(), 0, []

    def end_save(self) -> "SaveOverhead":
        """End a save, which ended during the last step, or now if training waited for it."""
        self._last = self._mark()
        blocking = SaveOverhead([*self._undisturbed], self._begin, self._last, self._steps, self._gaps)
        self._begin = None
        return blocking

    def _mark(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


@dataclass(frozen=True)
class SaveOverhead:
    """Marks of a save, from which its overhead follows once the device has passed them."""

    undisturbed: list[tuple[Any, Any]]
    begin: Any
    end: Any
    steps: int
    gaps: list[tuple[Any, Any]]

    def is_known(self) -> bool:
        return isinstance(self.end, float) or self.end.query()

    def seconds(self) -> float | None:
        """Return the time from begin to end, less that of as many undisturbed steps (their median).

        Values below 0 are noise. None if there was no step to compare with.
        """
        usual = [_between(a, b) for a, b in self.undisturbed]
        if self.steps and not usual:
            return None
        gaps = sum(_between(a, b) for a, b in self.gaps)
        return _between(self.begin, self.end) - gaps - (self.steps * median(usual) if self.steps else 0.0)


def _between(a: Any, b: Any) -> float:
    return b - a if isinstance(a, float) else a.elapsed_time(b) / 1e3
