# pyright: reportUnknownMemberType=false
"""The protocol of a save: stage, write, commit, retain. `Saver.save` shows it from the first step to the last.

Parameters and moments change only when the optimizer makes a step. So a thread copies them to host memory during the
next forward and backward, and the next optimizer step copies what is left. Then the thread writes the copy. On busy
CPUs it takes its time from training, so it has a lower priority and computes little: each rank writes only its own
part, each tensor has one checksum instead of two, and plans are made once.
"""

import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from titanlite.checkpoint import manifest as manifests
from titanlite.checkpoint.dcp_write import CachingPlanner, ShardWriter, WrittenFiles, write_state
from titanlite.checkpoint.manifest import Manifest, folder_name
from titanlite.checkpoint.staging import Staging
from titanlite.run.timeouts import CHECKPOINT_GROUP
from titanlite.runtime.private_torch.tensors import local_tensor
from titanlite.runtime.ranks import on_all, on_each, on_rank_0
from titanlite.schema import Checkpoint
from titanlite.state import State, flat
from titanlite.storage.storage import Storage

logger = logging.getLogger(__name__)

T = TypeVar("T")
Commit = tuple[int, float]
"""Step of a checkpoint, and `Manifest.saved_at`, by which it differs from another one of the same step."""
NICE = 10
"""Nice value of the thread: about a tenth of training's share of a core that both want. With much less (SCHED_IDLE,
nice 19), a save beside other busy processes took a minute, and training waited for it."""


@dataclass(frozen=True)
class Part:
    """Files that one rank has written, and the time that it took."""

    files: WrittenFiles
    seconds: tuple[float, float, float]
    """Of staging, planning and writing."""


@dataclass(frozen=True)
class Saved:
    """Step and size of a committed checkpoint, and the time of each part of its save: the longest of any rank."""

    step: int
    staging_seconds: float
    planning_seconds: float
    writing_seconds: float
    total_seconds: float
    bytes: int


@dataclass
class Saver:
    """Saves of a run's state, one after another. Each rank writes its own part."""

    config: Checkpoint
    storage: Storage
    group: dist.ProcessGroup
    """A gloo group of its own, because the thread uses it beside training."""
    device: torch.device
    """Device of the state."""
    pin: bool
    """Stage to pinned memory."""
    flush: Callable[[], None] | None
    """Called before a save where the state is on disk, and too large for a copy. The state itself is saved then, and
    training waits."""
    whole_config: str
    """Resolved config of the run as TOML, of which each checkpoint keeps a copy."""

    def __post_init__(self) -> None:
        self.planner = CachingPlanner(f"titanlite-{id(self)}")
        self.staging = Staging(self.device, pin=self.pin)
        self.newest: Commit = 0, 0.0
        """Commit of the newest checkpoint, on rank 0."""
        self._runs: dict[int, str | None] = {}
        """Run that has saved each checkpoint, on rank 0: each manifest is read once."""
        self._thread = ThreadPoolExecutor(1, "checkpoint", initializer=self._start_thread)

    @property
    def is_background(self) -> bool:
        """Whether training goes on while a save is written."""
        return self.config.async_mode != "disabled" and self.flush is None

    def start(self, state: State, draft: Manifest, *, background: bool) -> Future[Saved]:
        """Begin to save a state.

        Args:
            draft: manifest without files, hash, versions and times.
            background: write a copy in a thread. Otherwise the state itself is written before this returns.

        Returns:
            the result, once the checkpoint is committed. It raises RunError, the same on every rank, if any rank
            fails. Nothing is committed then.
        """
        if self.flush is not None:
            self.flush()
        if background:
            tensors = flat(state)
            self.staging.begin({name: tensors[name] for name in self.planner.written_here(tensors)})
        run = self._thread.submit if background else _done
        return run(lambda: self.save(state, draft, background=background))

    def save(self, state: State, draft: Manifest, *, background: bool) -> Saved:
        """Save a state, in a thread or while training waits.

        Each stage ends on all ranks, or fails on all, before the next begins. Nothing reads the checkpoint before the
        commit; a process that is killed earlier leaves a staging folder, which the next start deletes.
        """
        started, final = time.perf_counter(), folder_name(draft.step)
        # Stage: each rank copies its part to host memory.
        tensors = on_each(self.group, self.staging.copy) if background else flat(state)
        staging_seconds = time.perf_counter() - started
        try:
            # Write: rank 0 makes an empty staging folder. Each rank writes its part to one file, and syncs it.
            folder = self.begin(final)
            writer = self.writer(folder, lambda name: local_tensor(tensors[name]).cpu())
            write_state(state, writer, self.planner, self.group)
            # Commit: rank 0 collects the checksums of all ranks, writes the manifest, and renames the folder.
            part = Part(writer.written, (staging_seconds, writer.planning_seconds, writer.writing_seconds))
            saved = self.commit(writer, draft, part, started)
        except Exception:
            self.discard(final)
            raise
        # Retain: rank 0 deletes old checkpoints, after this save.
        self._thread.submit(self.retain)
        return saved

    def begin(self, final: str) -> str:
        """Return the name of the staging folder, which is empty."""
        return on_rank_0(self.group, lambda: self.storage.begin(final))

    def writer(self, folder: str, read: Callable[[str], Tensor]) -> ShardWriter:
        """Return what writes this rank's part; arguments as of `ShardWriter`."""
        return ShardWriter(self.storage, folder, dist.get_rank(self.group), read)

    def commit(self, writer: ShardWriter, draft: Manifest, part: Part, started: float) -> Saved:
        """Commit a checkpoint after every rank has written its part.

        Args:
            part: of this rank.
            started: when the save began, by `time.perf_counter`.

        Raises:
            RunError: on every rank, if a file is missing.
        """

        def publish(parts: list[Part]) -> Saved:
            manifest = writer.complete(draft, self.whole_config, started=started, others=[part.files for part in parts])
            writer.check_sizes(manifest)
            self.storage.check_claim()
            self.storage.publish(folder_name(manifest.step), manifest.to_json())
            self.newest = manifest.step, manifest.saved_at
            return saved_of(manifest, parts, started)

        return on_all(self.group, lambda: part, publish)

    def close(self) -> None:
        """Wait for deletions, and end the thread. No save may be running."""
        self._thread.shutdown(wait=True)
        self.planner.forget()

    def _start_thread(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        if sys.platform == "linux":  # elsewhere, a priority belongs to the process
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)

    def discard(self, folder: str) -> None:
        """Delete what a failed save has written, on rank 0, so that a full disk has room for the next save. A
        committed folder stays."""
        if dist.get_rank(self.group) == 0:
            with contextlib.suppress(Exception):
                self.storage.discard(folder)

    def retain(self) -> None:
        """Delete checkpoints by the retention rule, on rank 0, if the newest is the one saved last, and complete. Those
        of other runs do not count, and stay."""
        if dist.get_rank(self.group) != 0:
            return
        try:
            before, listing = self.newest[0], self.storage.list()
            for step in manifests.committed_steps(listing):
                if step not in self._runs:
                    self._runs[step] = self.storage.run_of(folder_name(step), listing[folder_name(step)])
            own = (None, self.storage.owner)
            steps = [step for step in manifests.committed_steps(listing) if self._runs[step] in own]
            newest = folder_name(steps[-1])
            if steps[-1] not in (before, self.newest[0]):  # another one may be committed meanwhile
                logger.warning(f"old checkpoints are not deleted: {newest} is not of this start")
                return
            manifests.read_complete(self.storage, newest, listing[newest])
            keep_latest_k, keep_every = self.config.keep_latest_k, self.config.keep_every
            for unwanted in manifests.to_delete(steps, keep_latest_k=keep_latest_k, keep_every=keep_every):
                self.storage.delete(folder_name(unwanted))
        except Exception as error:
            logger.warning(f"old checkpoints could not be deleted: {error}")


def build_saver(
    config: Checkpoint,
    storage: Storage,
    device: torch.device,
    *,
    flush: Callable[[], None] | None = None,
    whole_config: str,
    timeout_seconds: float = 1800,
) -> Saver:
    """Return the saver of a run's checkpoints.

    Args: as of `Saver`.
        timeout_seconds: longest wait of a rank for another one that writes or reads a checkpoint.
    """
    # A save runs in a thread: its collectives must not mix with training's.
    timeout = timedelta(seconds=timeout_seconds)
    group = dist.new_group(backend="gloo", timeout=timeout, group_desc=CHECKPOINT_GROUP)
    assert isinstance(group, dist.ProcessGroup)
    pin = config.async_mode == "async_with_pinned_mem" and flush is None
    if config.enable and config.async_mode != "disabled" and flush is not None:
        logger.info("checkpoint.async_mode: states on disk are saved as they are, and training waits for that")
    if pin and device.type == "cpu":
        logger.info("checkpoint.async_mode: without a GPU there is nothing to pin memory for; async is used")
        pin = False
    return Saver(config, storage, group, device, pin=pin, flush=flush, whole_config=whole_config)


def saved_of(manifest: Manifest, parts: list[Part], started: float) -> Saved:
    """Return the result of a save, of all ranks' parts."""
    staging, planning, writing = (max(column) for column in zip(*(part.seconds for part in parts), strict=True))
    return Saved(manifest.step, staging, planning, writing, time.perf_counter() - started, manifest.size)


def _done(act: Callable[[], T]) -> Future[T]:
    """Call a function now, and return its result or error."""
    done: Future[T] = Future()
    try:
        done.set_result(act())
    except Exception as error:
        done.set_exception(error)
    return done
