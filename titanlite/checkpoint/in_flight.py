"""Saves that have begun and not ended: when to wait for one, and how a failure reaches every rank at the same step."""

import logging
from collections.abc import Callable
from concurrent.futures import wait as wait_for
from dataclasses import dataclass

import torch
import torch.distributed as dist

from titanlite.checkpoint.save import Save, Saved
from titanlite.checkpoint.save_overhead import SaveOverhead, StepClock
from titanlite.runtime.errors import RunError

logger = logging.getLogger(__name__)


@dataclass
class _InFlight:
    step: int
    save: Save
    overhead: SaveOverhead | None = None
    """Set when the state is written."""

    def has_failed(self) -> bool:
        return any(part.done() and part.exception() is not None for part in (self.save.written, self.save.saved))


class SavesInFlight:
    """Saves that have not ended, oldest first. One of them, the newest, may still be written.

    Args:
        clock: measures what they cost training.
        on_commit: called with the step, the result and the cost of a save that has succeeded.
        most: number of saves at a time. The host holds one copy of the state: further ones are on the nodes' disks.
    """

    def __init__(
        self, clock: StepClock, on_commit: Callable[[int, Saved, SaveOverhead], None], *, most: int = 1
    ) -> None:
        self._clock = clock
        self._on_commit = on_commit
        self._most = most
        self._saves: list[_InFlight] = []

    def add(self, step: int, save: Save) -> None:
        self._saves.append(_InFlight(step, save))

    def any(self) -> bool:
        """Return whether there is a save."""
        return bool(self._saves)

    def make_room(self) -> None:
        """Wait until the next save may begin.

        Raises:
            RunError: a save that was waited for has failed.
        """
        self.wait_until_written()
        while len(self._saves) >= self._most:
            self._end_oldest()

    def wait_until_written(self) -> None:
        """Wait until the state is written. From then on a save does not hold training up."""
        if self._saves:
            wait_for([self._saves[-1].save.written])
            self._end_writing()

    def end_all(self, *, must_succeed: bool = True) -> None:
        """Wait for every save.

        Args:
            must_succeed: raise if a save failed. Otherwise a warning reports it.

        Raises:
            RunError: a save failed, and must_succeed is set.
        """
        while self._saves:
            self._end_oldest(must_succeed=must_succeed)

    def check(self) -> None:
        """End the saves that are complete on every rank. Every rank calls it at the end of every step.

        Raises:
            RunError: on every rank at the same step, if a save failed on any.
        """
        if not self._saves:
            return
        is_writing = not self._saves[-1].save.written.done()
        is_running = not self._saves[0].save.saved.done()
        has_failed = any(in_flight.has_failed() for in_flight in self._saves)
        flags = torch.tensor([is_writing, is_running, has_failed], dtype=torch.int32)
        dist.all_reduce(flags, op=dist.ReduceOp.MAX)  # on the CPU, and of 12 bytes
        is_writing, is_running, has_failed = map(bool, flags.tolist())
        if has_failed:
            step = self._saves[-1].step
            while self._saves:
                self._end_oldest(timeout=30 if is_writing or is_running else None)
            raise RunError(f"the checkpoint of step {step} could not be saved: another rank failed")
        if not is_writing:
            self._end_writing()
        if not is_running:
            self._end_oldest()

    def _end_writing(self) -> None:
        newest = self._saves[-1]
        if newest.overhead is None:
            newest.overhead = self._clock.end_save()

    def _end_oldest(self, *, timeout: float | None = None, must_succeed: bool = True) -> None:
        """Finish the oldest save.

        Args:
            timeout: seconds to wait after a failure of another rank, which may leave this rank's thread hanging.
        """
        oldest = self._saves.pop(0)
        future = oldest.save.saved
        wait_for([future], timeout)
        overhead = oldest.overhead or self._clock.end_save()
        error = future.exception() if future.done() else RunError("another rank failed")
        if error is None:
            self._on_commit(oldest.step, future.result(), overhead)
            return
        text = f"the checkpoint of step {oldest.step} could not be saved: {error}"
        if must_succeed:
            raise RunError(text) from error
        logger.warning(f"{text}. Continuing without it")
