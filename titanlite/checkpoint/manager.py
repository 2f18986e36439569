# pyright: reportUnknownMemberType=false
"""Decisions about checkpoints: what to load, when to save, when to wait for a save, what to do when one fails.

What a save does is in `Saver.save`.
"""

import logging
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from contextlib import AbstractContextManager
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from titanlite.checkpoint.history import History, RunHistory
from titanlite.checkpoint.initial import InitialWeights, Opener
from titanlite.checkpoint.manifest import Manifest, Progress
from titanlite.checkpoint.resume import Candidate, RunSettings, SharedCheckpoints, Source
from titanlite.checkpoint.save import Saved, Saver
from titanlite.checkpoint.save_overhead import SaveClock, SaveOverhead
from titanlite.runtime.errors import DamagedCheckpoint, RunError
from titanlite.runtime.ranks import on_rank_0
from titanlite.schema import Checkpoint
from titanlite.state import TrainingState

if TYPE_CHECKING:
    from titanlite.checkpoint.local import LocalCopies

logger = logging.getLogger(__name__)

Record = dict[str, float | None]
"""Step, size and seconds of a save, by name."""


class CheckpointManager:
    """Loads and saves the checkpoints of a run. Every rank reads and writes its own part of the state.

    Args:
        saver: of the shared checkpoints.
        copies: local copies, if the run makes them.
        open_weights: opens initial_load_path where other programs wrote it.
    """

    def __init__(
        self,
        config: Checkpoint,
        state: TrainingState,
        *,
        saver: Saver,
        history: RunHistory,
        settings: RunSettings,
        copies: "LocalCopies | None" = None,
        open_weights: Opener | None = None,
    ) -> None:
        self.config, self.state, self.storage, self.is_background = config, state, saver.storage, saver.is_background
        self._saver, self._history, self._settings, self._copies = saver, history, settings, copies
        shared = SharedCheckpoints(state, saver, history, settings)
        initial = InitialWeights(config, state, settings, saver.group, open_weights, shared.check_beginning)
        self._sources: list[Source] = [shared, *([copies] if copies else []), initial] if config.enable else [initial]
        """Where a run may begin. Each is asked for what is newer than what those before it have."""
        self._clock = SaveClock(saver.device)
        self._in_flight: tuple[int, Future[Saved]] | None = None
        """Step of the save that has begun and not ended, and its result."""
        self._ended: list[tuple[Saved, SaveOverhead]] = []
        self.newest = 0
        """Step of the newest checkpoint that was loaded or committed; local copies are none."""
        self.owes_save = False
        """A checkpoint was due before the local copy from which the run resumed, and was not committed."""
        self.can_go_back = False
        """A checkpoint or a local copy was loaded or, in this start, a checkpoint was begun or a copy completed."""
        state.optimizer.register_step_pre_hook(self.wait_until_staged)

    def load(self) -> Progress:
        """Load the newest state that the run may continue with in place, or else the initial weights.

        Raises:
            UserError: no checkpoint fits, or the run's checkpoints have disappeared.
            RunError: what was read in part cannot be undone.
        """
        is_undefined = False
        if self.config.enable:
            on_rank_0(self._saver.group, self.storage.sweep)
        while True:
            candidate = self._newest()
            if is_undefined and not candidate.step:
                raise RunError("a local copy was read in part, and there is no checkpoint: start again")
            try:
                progress = candidate.load()
                break
            except DamagedCheckpoint as damage:  # known only as it is read: the one before is tried
                candidate.reject(damage)
                is_undefined = True
        self.newest, _ = self._saver.newest
        self.can_go_back = candidate.step > 0
        self.owes_save = self.newest < candidate.step // self.config.interval * self.config.interval
        if self._copies:
            self._copies.continue_at(progress.step)
        return progress

    def _newest(self) -> Candidate:
        newest = None
        for source in self._sources:
            newest = source.newest(after=newest.step if newest else 0) or newest
        assert newest  # the last source always has one
        return newest

    def go_back(self) -> Progress:
        """Load the newest checkpoint or local copy once more, after the saves in flight.

        Raises:
            RunError: a save in flight has failed, or nothing can be read.
            UserError: the checkpoints have disappeared.
        """
        self._end_save()
        self._history.go_back(has_saved=self.newest > 0)
        with self._clock.not_training():
            progress = self.load()
        if not progress.step:
            raise RunError("no local copy to go back to can be read: start again")
        return progress

    def watch(self) -> list[Record]:
        """Check on a save in flight. Every rank calls it at the end of every step. Returns records of finished saves.

        Raises:
            RunError: on every rank at the same step, if a save failed on any.
        """
        self._clock.step()
        if self._in_flight is not None:
            step, save = self._in_flight
            flags = torch.tensor([not save.done(), save.done() and save.exception() is not None], dtype=torch.int32)
            dist.all_reduce(flags, op=dist.ReduceOp.MAX)  # 8 bytes over gloo: cheap
            is_running, has_failed = bool(flags[0]), bool(flags[1])
            if has_failed:
                self._end_save(timeout=30 if is_running else None)
                raise RunError(f"the checkpoint of step {step} could not be saved: another rank failed")
            if not is_running:
                self._end_save()
        return self._records()

    def not_training(self) -> AbstractContextManager[None]:
        """Exclude a block from the cost of saving."""
        return self._clock.not_training()

    def wait_until_staged(self, *_: object) -> None:
        """Return when the state may change. The optimizer calls it before each step."""
        self._saver.staging.wait()
        if self._copies is not None:
            self._copies.wait_until_staged()

    def is_saving(self) -> bool:
        """Return whether a save has begun and not ended."""
        return self._in_flight is not None

    def save(self, progress: Progress, *, last: bool) -> None:
        """Start a save, and return; with async_mode = "disabled" and at the end of the run, wait for it.

        Raises:
            RunError: on every rank, if the previous save has failed, or this one where it is waited for.
        """
        self._end_save()
        self._clock.begin_save()
        self.owes_save = False
        self.can_go_back = True
        background = self.is_background and not last
        self._in_flight = (
            progress.step,
            self._saver.start(self.state.tensors(), self._draft(progress), background=background),
        )
        if not background:
            self._end_save()

    def copy(self, progress: Progress, *, is_target: bool = False) -> None:
        """Start to make local copies, and return.

        Args:
            is_target: a rollback may return to the copy, so that no due one may be missing: the one before is waited
                for, and so is this one while there is nothing else to return to.
        """
        if self._copies is None:
            return
        saving = self._in_flight[0] if self._in_flight else None
        history = History(*self._saver.newest, saving=saving, start=self._history.start)
        self._copies.save(self.state.tensors, partial(self._draft, progress), history, waits=is_target)
        if is_target and not self.can_go_back:
            self.can_go_back = self._copies.is_whole()

    def save_if_newer(self, progress: Progress) -> None:
        """Save the state at the end of an earlier step, and wait; do nothing if that step or a later one is saved.

        A save in flight is waited for. If it fails, this one takes its place.

        Raises:
            RunError: the save failed.
        """
        self._end_save(must_succeed=False)
        if self.config.enable and progress.step > self.newest:
            self.save(progress, last=True)

    def finish(self) -> list[Record]:
        """Wait for a save and deletions in flight. Returns records of finished saves."""
        self._end_save(must_succeed=False)
        self._saver.close()
        if self._copies is not None:
            self._copies.close(saved=self.newest)
        return self._records(wait=True)

    def _draft(self, progress: Progress) -> Manifest:
        return Manifest(
            step=progress.step,
            samples=progress.samples_seen,
            data=progress.data,
            guard=progress.guard,
            run_id=self.storage.owner,
            settings=self._settings.at(progress.samples_seen),
            mesh={**self._settings.layout},
            load_step=self.config.load_step,
        )

    def _end_save(self, *, timeout: float | None = None, must_succeed: bool = True) -> None:
        """Wait for the save in flight, if there is one.

        Args:
            timeout: seconds to wait after a failure of another rank, which may leave this rank's thread hanging.
            must_succeed: raise if it failed. Otherwise a warning reports it.

        Raises:
            RunError: it failed, and must_succeed is set.
        """
        if self._in_flight is None:
            return
        (step, save), self._in_flight = self._in_flight, None
        wait_for([save], timeout)
        overhead = self._clock.end_save()
        error = save.exception() if save.done() else RunError("another rank failed")
        if error is None:
            self.newest = step
            self._ended.append((save.result(), overhead))
            return
        text = f"the checkpoint of step {step} could not be saved: {error}"
        if must_succeed:
            raise RunError(text) from error
        logger.warning(f"{text}. Continuing without it")

    def _records(self, *, wait: bool = False) -> list[Record]:
        records: list[Record] = []
        while self._ended and (wait or self._ended[0][1].is_known()):
            saved, overhead = self._ended.pop(0)
            if wait and not overhead.is_known():
                torch.cuda.synchronize()
            seconds = overhead.seconds()
            blocked = "" if seconds is None else f", training was held up for {max(seconds, 0):.2f} s"
            size = saved.bytes / 2**20
            logger.info(
                f"saved checkpoint of step {saved.step}: {size:,.0f} MiB in {saved.total_seconds:.2f} s{blocked}"
            )
            records.append({"step": saved.step, "blocking_seconds": seconds} | asdict(saved))
        return records
