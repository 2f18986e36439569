"""The save that has begun and not ended: when to wait for it, and how a failure reaches every rank at the same step."""

import logging
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import wait as wait_for

import torch
import torch.distributed as dist

from titanlite.checkpoint.save import Saved
from titanlite.checkpoint.save_overhead import SaveOverhead, StepClock
from titanlite.runtime.errors import RunError

logger = logging.getLogger(__name__)


class SaveInFlight:
    """The save that has not ended, if there is one.

    Args:
        clock: measures what it costs training.
        on_commit: called with the step, the result and the cost of a save that has succeeded.
    """

    def __init__(self, clock: StepClock, on_commit: Callable[[int, Saved, SaveOverhead], None]) -> None:
        self._clock = clock
        self._on_commit = on_commit
        self._save: tuple[int, Future[Saved]] | None = None

    def begin(self, step: int, save: Future[Saved]) -> None:
        self._save = step, save

    def any(self) -> bool:
        """Return whether there is a save."""
        return self._save is not None

    def check(self) -> None:
        """End the save if it is complete on every rank. Every rank calls it at the end of every step.

        Raises:
            RunError: on every rank at the same step, if it failed on any.
        """
        if self._save is None:
            return
        step, save = self._save
        flags = torch.tensor([not save.done(), save.done() and save.exception() is not None], dtype=torch.int32)
        dist.all_reduce(flags, op=dist.ReduceOp.MAX)  # on the CPU, and of 8 bytes
        is_running, has_failed = map(bool, flags.tolist())
        if has_failed:
            self.end(timeout=30 if is_running else None)
            raise RunError(f"the checkpoint of step {step} could not be saved: another rank failed")
        if not is_running:
            self.end()

    def end(self, *, timeout: float | None = None, must_succeed: bool = True) -> None:
        """Wait for the save, if there is one.

        Args:
            timeout: seconds to wait after a failure of another rank, which may leave this rank's thread hanging.
            must_succeed: raise if it failed. Otherwise a warning reports it.

        Raises:
            RunError: it failed, and must_succeed is set.
        """
        if self._save is None:
            return
        (step, save), self._save = self._save, None
        wait_for([save], timeout)
        overhead = self._clock.end_save()
        error = save.exception() if save.done() else RunError("another rank failed")
        if error is None:
            self._on_commit(step, save.result(), overhead)
            return
        text = f"the checkpoint of step {step} could not be saved: {error}"
        if must_succeed:
            raise RunError(text) from error
        logger.warning(f"{text}. Continuing without it")
