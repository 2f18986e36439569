"""Step time, without checkpoints and validation, and the wait for data."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class StepTimer:
    """Timer of the steps since the last record."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.restart()

    def restart(self) -> None:
        """Begin a new window."""
        self.steps = 0
        self.data_wait = 0.0
        """Seconds of waiting for data."""
        self._started = time.perf_counter()
        self._excluded = 0.0

    def elapsed(self) -> float:
        """Return the seconds of all steps in the window."""
        return time.perf_counter() - self._started - self._excluded

    @contextmanager
    def waiting_for_data(self) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.data_wait += time.perf_counter() - started

    @contextmanager
    def excluding(self, *, waits_for_device: bool) -> Iterator[None]:
        """Exclude a block from step time, but not the work that is queued on a GPU before it.

        Args:
            waits_for_device: whether the block would wait for that work.
        """
        if waits_for_device and self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        started = time.perf_counter()
        yield
        self._excluded += time.perf_counter() - started
