# pyright: reportUnknownMemberType=false
"""Decisions about checkpoints: what to load, when to save, when to wait for a save, what to do when one fails.

What a save does is in `Saver.save`.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from titanlite.checkpoint.dcp_read import ShardReader
from titanlite.checkpoint.history import History, RunHistory
from titanlite.checkpoint.initial import Opener, load_initial
from titanlite.checkpoint.manifest import Manifest, Progress, Settings
from titanlite.checkpoint.resume import Resumption, RunSettings
from titanlite.checkpoint.save import Saved, Saver
from titanlite.checkpoint.save_overhead import SaveClock, SaveOverhead
from titanlite.checkpoint.state import (
    State,
    begin_anew,
    complete_optimizer_state,
    model_state,
    put_back_numbers,
    state_of,
)
from titanlite.models.base import added_parameters
from titanlite.run.timeouts import CHECKPOINT_GROUP
from titanlite.runtime.errors import DamagedCheckpoint, RunError, UserError
from titanlite.runtime.ranks import on_rank_0
from titanlite.schema import Checkpoint

if TYPE_CHECKING:
    from titanlite.checkpoint.local import LocalCopies

logger = logging.getLogger(__name__)

Record = dict[str, float | None]
"""Step, size and seconds of a save, by name."""


class CheckpointManager:
    """Loads and saves the checkpoints of a run. Every rank reads and writes its own part of the state.

    Args:
        history: what the run went through, and where its checkpoints are.
        before_read: returns when the state may be read.
        further: tensors in use of further parts of the state, by the part and their names; see `FURTHER`.
        settings: returns the settings that must match on resume, by the samples that the run has seen by then.
        may_change: globs of settings that need not match.
        whole_config: resolved config of the run as TOML, of which each checkpoint keeps a copy.
        timeout_seconds: longest wait of a rank for another one that writes or reads a checkpoint.
        worker: number of the replica that this rank belongs to, where replicas have states of their own. The parts
            `further` are the same everywhere.
        flush: called before a save where the state is on disk, and too large for a copy. The state itself is saved
            then, and training waits.
        open_weights: opens initial_load_path where other programs wrote it.
    """

    def __init__(
        self,
        config: Checkpoint,
        *,
        history: RunHistory,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        before_read: Callable[[], None] = lambda: None,
        further: Mapping[str, Mapping[str, Tensor]] | None = None,
        worker: int | None = None,
        mesh: DeviceMesh,
        device: torch.device,
        settings: Callable[[int], Settings],
        may_change: Sequence[str] = (),
        whole_config: str,
        timeout_seconds: float = 1800,
        flush: Callable[[], None] | None = None,
        open_weights: Opener | None = None,
    ) -> None:
        self.config = config
        self.history = history
        self.storage = storage = history.storage
        self.model = model
        self.optimizer = optimizer
        self._further = further or {}
        self._worker = worker
        self._before_read = before_read
        self.mesh = mesh
        # A save runs in a thread: its collectives must not mix with training's.
        timeout = timedelta(seconds=timeout_seconds)
        group = dist.new_group(backend="gloo", timeout=timeout, group_desc=CHECKPOINT_GROUP)
        assert isinstance(group, dist.ProcessGroup)
        self.is_background = config.async_mode != "disabled" and flush is None
        if config.enable and config.async_mode != "disabled" and flush is not None:
            logger.info("checkpoint.async_mode: states on disk are saved as they are, and training waits for that")
        pin = self.is_background and config.async_mode == "async_with_pinned_mem"
        if pin and device.type == "cpu":
            logger.info("checkpoint.async_mode: without a GPU there is nothing to pin memory for; async is used")
            pin = False
        self._saver = Saver(config, storage, group, device, pin=pin, flush=flush, whole_config=whole_config)
        self._local: LocalCopies | None = None
        if config.local_interval:
            from titanlite.checkpoint import local  # few runs make copies

            try:
                self._local = local.LocalCopies(
                    config, url=storage.url, run_id=storage.owner, device=device, pin=pin, whole_config=whole_config,
                    timeout_seconds=timeout_seconds,
                )  # fmt: skip
            except (RunError, UserError) as error:
                logger.warning(f"checkpoint.local_interval: no local copies are made: {error}")
        self._open_weights = open_weights
        self._is_cut = bool(getattr(model, "stages", ())) or worker is not None
        allowed = [*config.allow_changes, *may_change]
        self._settings = RunSettings(settings, allowed, model=model_state(model), is_cut=self._is_cut)
        self._has_state_from_start = {*optimizer.state}
        self._initial: dict[str, Tensor] = {}
        """Values of parameters that no checkpoint has yet, since a changed setting has added them."""
        self._group = group
        self._clock = SaveClock(device)
        self._in_flight: tuple[int, Future[Saved]] | None = None
        """Step of the save that has begun and not ended, and its result."""
        self._ended: list[tuple[Saved, SaveOverhead]] = []
        self.newest = 0
        """Step of the newest checkpoint that was loaded or committed; local copies are none."""
        self.owes_save = False
        """A checkpoint was due before the local copy from which the run resumed, and was not committed."""
        self.can_go_back = False
        """A checkpoint or a local copy was loaded or, in this start, a checkpoint was begun or a copy completed."""
        self._start = len(history.starts)
        optimizer.register_step_pre_hook(self.wait_until_staged)

    def state(self) -> State:
        """Return the tensors of a checkpoint, which nothing changes before the next step."""
        return self._named(self._state())

    def _state(self) -> State:
        self._before_read()
        further = {part: {**tensors} for part, tensors in self._further.items()}
        return state_of(self.model, self.optimizer) | further

    def _named(self, state: State) -> State:
        """Return a state with the names of a checkpoint: those of the first worker are the usual ones."""
        if not self._worker:
            return state
        own = (part if part in self._further else f"worker{self._worker}.{part}" for part in state)
        return dict(zip(own, state.values(), strict=True))

    def load(self) -> Progress:
        """Load the newest complete checkpoint of the run in place. Without one, load `initial_load_path` if it is set.

        Raises:
            UserError: no checkpoint fits, or the run's checkpoints have disappeared.
        """
        progress = self._load()
        if self._local is not None:
            self._local.continue_at(progress.step)
        return progress

    def _load(self) -> Progress:
        if self.config.enable:
            on_rank_0(self._group, self.storage.sweep)
            resumption = Resumption(self.config, self.history, self._settings, self._group, self._is_cut)
            if progress := self._resume(resumption):
                self.can_go_back = True
                return progress
            if on_rank_0(self._group, lambda: self.history.has_saved):  # rank 0 reads the run's folder
                raise UserError(
                    f"this run has saved checkpoints, and none is in {self.storage.url}. Is that the right place, and "
                    "is it mounted? To begin anew, give another job.name, or delete the run's folder"
                )
        if self.config.initial_load_path is None:
            return Progress()
        if has_states := any(name.startswith("optimizer") for name in self.config.initial_load):
            complete_optimizer_state(self.model, self.optimizer)
        state = self._state()
        manifest, loaded = load_initial(
            self.config, state, settings=self._settings, added=added_parameters(self.model),
            open_weights=self._open_weights, group=self._group, is_cut=self._is_cut,
        )  # fmt: skip
        put_back_numbers(self.model, self.optimizer, state)
        if has_states:
            begin_anew(self.model, self.optimizer, loaded, has_from_start=self._has_state_from_start)
        return manifest.progress if manifest is not None else Progress()

    def go_back(self) -> Progress:
        """Load the newest checkpoint or local copy once more, after the saves in flight.

        Raises:
            RunError: a save in flight has failed, or nothing can be read.
            UserError: the checkpoints have disappeared.
        """
        self._end_save()
        starts = [*self.history.starts[: self._start], None]  # copies of this start count too
        self.history = replace(self.history, starts=starts, has_saved=self.newest > 0)
        with self._clock.not_training():
            progress = self.load()
        if not progress.step:
            raise RunError("no local copy to go back to can be read: start again")
        return progress

    def _resume(self, resumption: Resumption) -> Progress | None:
        """Load the newest local copy that continues the run, or the newest checkpoint if that is newer.

        Raises:
            RunError: what was read in part cannot be undone.
        """
        self._is_undefined = False
        while True:
            shared = on_rank_0(self._group, resumption.choose)
            newest = shared.step if shared else 0
            if shared is not None:
                self._saver.newest = shared.step, shared.saved_at
            if progress := self._load_copy(resumption, newest):
                self.newest = newest
                self.owes_save = newest < progress.step // self.config.interval * self.config.interval
                return progress
            if shared is None:
                break
            try:
                self._read(resumption, shared)
            except DamagedCheckpoint as damage:  # known only as it is read: the one before is tried
                on_rank_0(self._group, partial(resumption.quarantine, newest, damage))
                continue
            self.newest = newest
            return shared.progress
        on_rank_0(self._group, resumption.refuse_damaged)
        if self._is_undefined:
            raise RunError("a local copy was read in part, and there is no checkpoint: start again")
        return None

    def _load_copy(self, resumption: Resumption, newest: int) -> Progress | None:
        """Load the newest local copy after step `newest` that continues this run; return None if there is none."""
        for copy in self._local.search(after=newest) if self._local is not None else ():
            assert self._local is not None
            try:
                where = self._local.storage.url_of(copy.folder)
                if not on_rank_0(
                    self._group, partial(resumption.allows, copy.manifest, self._local.history(copy), where)
                ):
                    continue
                self._is_undefined = True
                self._read(resumption, copy.manifest, partial(self._local.open, copy))
            except (DamagedCheckpoint, RunError) as error:
                logger.warning(f"the local copy of step {copy.manifest.step} cannot be read: {error}")
                continue
            step, fetched = copy.manifest.step, self._local.fetched
            logger.info(
                f"local    copies of step {step} in {self._local.storage.root} are taken"
                + (f" ({fetched} files from other machines)" if fetched else "")
                + f": they save {step - newest} steps"
            )
            return copy.manifest.progress
        return None

    def _read(
        self, resumption: Resumption, manifest: Manifest, open_reader: Callable[[], ShardReader] | None = None
    ) -> None:
        complete_optimizer_state(self.model, self.optimizer)
        state = self._state()
        loaded = resumption.load(manifest, self._named(state), open_reader)
        if self._worker:
            loaded = {name.removeprefix(f"worker{self._worker}.") for name in loaded}
        put_back_numbers(self.model, self.optimizer, state)
        begin_anew(self.model, self.optimizer, loaded, has_from_start=self._has_state_from_start)
        for name, tensor in state["model"].items():
            if f"model.{name}" not in loaded:  # a rollback finds trained values
                tensor.copy_(self._initial.setdefault(name, tensor.detach().clone()))

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
        if self._local is not None:
            self._local.wait_until_staged()

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
        self._in_flight = progress.step, self._saver.start(self.state(), self._draft(progress), background=background)
        if not background:
            self._end_save()

    def copy(self, progress: Progress, *, is_target: bool = False) -> None:
        """Start to make local copies, and return.

        Args:
            is_target: a rollback may return to the copy, so that no due one may be missing: the one before is waited
                for, and so is this one while there is nothing else to return to.
        """
        if self._local is None:
            return
        saving = self._in_flight[0] if self._in_flight else None
        history = History(*self._saver.newest, saving=saving, start=self._start)
        self._local.save(self.state, partial(self._draft, progress), history, waits=is_target)
        if is_target and not self.can_go_back:
            self.can_go_back = self._local.is_whole()

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
        if self._local is not None:
            self._local.close(saved=self.newest)
        return self._records(wait=True)

    def _draft(self, progress: Progress) -> Manifest:
        return Manifest(
            step=progress.step,
            samples=progress.samples_seen,
            data=progress.data,
            guard=progress.guard,
            run_id=self.storage.owner,
            settings=self._settings.at(progress.samples_seen),
            mesh=dict(zip(self.mesh.mesh_dim_names or (), self.mesh.shape, strict=True)),
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
