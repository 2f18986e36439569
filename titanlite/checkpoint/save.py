"""Saves beside training: copy the state to host memory, then write the copy in a thread of low priority.

Parameters and moments change only when the optimizer makes a step, so the copy is made during the next forward and
backward; the next optimizer step makes what is left of it. On busy CPUs a thread that writes takes its time from
training. So this thread has a lower priority and computes little: each rank writes its own part of the state, each
tensor has one checksum instead of two, and plans are made once.

With `checkpoint.local_folder`, that thread writes to a disk of each node, and a second one copies from there.
"""

import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException

from titanlite.checkpoint import manifest as manifests
from titanlite.checkpoint.dcp_write import ShardWriter, WrittenFile, checksums_json
from titanlite.checkpoint.local import LocalFolder, check_complete, copy_and_commit, new_name
from titanlite.checkpoint.manifest import FileRecord, Manifest
from titanlite.checkpoint.save_plan import CachingPlanner
from titanlite.checkpoint.staging import Staging
from titanlite.checkpoint.state import State, flat
from titanlite.runtime.private_torch.tensors import local_tensor
from titanlite.runtime.ranks import error_of_ranks, on_all, on_rank_0
from titanlite.storage.storage import MANIFEST, Storage

logger = logging.getLogger(__name__)

T = TypeVar("T")
NICE = 10
"""Nice value of the thread: about a tenth of training's share of a core that both want. With much less (SCHED_IDLE,
nice 19), a save beside other busy processes took a minute, and training waited for it."""

MakeManifest = Callable[[dict[str, FileRecord]], Manifest]
"""Makes a manifest from the sizes and checksums of the files."""
Times = tuple[float, float, float]
"""Seconds of staging, planning and writing."""
OfRank = tuple[Times, dict[str, WrittenFile]]
"""Times of a rank, and the files that it has written."""


@dataclass(frozen=True)
class Saved:
    """Size of a committed checkpoint, and the time of each part of its save: the longest of any rank."""

    staging_seconds: float
    planning_seconds: float
    writing_seconds: float
    total_seconds: float
    bytes: int


@dataclass(frozen=True)
class Save:
    """A save in flight. If it fails on any rank, its result is an error, the same on every rank."""

    written: Future[Any]
    """Done when every rank has written its part, so that the next save may begin."""
    saved: Future[Saved]
    """Done when the checkpoint is committed."""


class Saver:
    """Writer of one state after another, each rank its part.

    Args:
        group: a gloo group of its own, because another thread than training's uses it.
        device: device of the state.
        pin: stage to pinned memory.
        config: resolved config as TOML, of which each checkpoint keeps a copy.
        local: folder on a disk of this node, to which saves are written first.
        copy_group: a further group, for the thread that copies from that folder.
    """

    def __init__(
        self,
        storage: Storage,
        *,
        group: dist.ProcessGroup,
        device: torch.device,
        pin: bool,
        config: str,
        local: LocalFolder | None = None,
        copy_group: dist.ProcessGroup | None = None,
    ) -> None:
        self.storage = storage
        self.group = group
        self.device = device
        self.config = config
        self.local = local
        self.commit_group = copy_group or group
        self.planner = CachingPlanner(f"titanlite-{id(self)}")
        self.staging = Staging(device, pin=pin)
        self._thread = self._commits = ThreadPoolExecutor(1, "checkpoint", initializer=self._start_thread)
        if local is not None:
            self._commits = ThreadPoolExecutor(1, "checkpoint copy", initializer=self._start_thread)

    def start(self, state: State, folder: str, make_manifest: MakeManifest, *, background: bool) -> Save:
        """Save a state.

        Args:
            make_manifest: called on rank 0.
            background: write a copy in a thread. Otherwise the state itself is written before this returns.

        The results raise RunError, the same on every rank, if any rank fails. Nothing is committed then.
        """
        if background:
            tensors = flat(state)
            self.staging.begin({name: tensors[name] for name in self.planner.written_here(tensors)})
        run = self._thread.submit if background else _done
        staging = self.staging if background else None
        if self.local is None:
            saved = run(lambda: self._write(state, folder, make_manifest, staging=staging)())
            return Save(saved, saved)
        written = run(lambda: self._write(state, folder, make_manifest, staging=staging))
        return Save(written, self._commits.submit(lambda: written.result()()))

    def later(self, act: Callable[[], None]) -> None:
        """Call a function in the thread that commits, after the saves in flight."""
        self._commits.submit(act)

    def wait_until_staged(self) -> None:
        """Return when the state may change."""
        self.staging.wait()

    def close(self) -> None:
        self._thread.shutdown(wait=True)
        self._commits.shutdown(wait=True)
        self.planner.forget()

    def _start_thread(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        if sys.platform == "linux":  # elsewhere, a priority belongs to the process
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)

    def _write(
        self, state: State, folder: str, make_manifest: MakeManifest, *, staging: Staging | None
    ) -> Callable[[], Saved]:
        """Write this rank's part, and return what is left to do: to commit, after a copy from a local disk."""
        started = time.perf_counter()
        tensors = flat(state) if staging is None else self._copy_on_all(staging)
        writing = _Writing(state, tensors, folder, make_manifest, started, time.perf_counter() - started)
        if self.local is None:
            return self._write_shared(writing)
        name = on_rank_0(self.group, lambda: new_name(folder))
        try:
            return self._write_locally(self.local, name, writing)
        except Exception as error:  # the same on every rank, for example a full disk: the state is still at hand
            self.local.delete(name)
            if dist.get_rank(self.group) == 0:
                where = self.storage.url_of(folder)
                logger.warning(f"checkpoint.local_folder: {error}. So {where} is written without the local disk")
            return self._write_shared(writing)

    def _write_shared(self, writing: "_Writing") -> Callable[[], Saved]:
        """Write where all ranks write."""
        folder = writing.folder
        with self._discarding_on_error(folder):
            target = on_rank_0(self.group, lambda: self.storage.begin(folder))
            writer, of_rank = self._write_part(writing, self.storage, target)

        def commit() -> Saved:
            with self._discarding_on_error(folder):
                return on_all(
                    self.commit_group,
                    lambda: of_rank,
                    lambda of_ranks: self._commit(writing, target, self._complete(writer, of_ranks), of_ranks),
                )

        return commit

    def _write_locally(self, local: LocalFolder, name: str, writing: "_Writing") -> Callable[[], Saved]:
        """Write to a disk of this node."""
        on_all(self.group, lambda: local.make(name))
        writer, of_rank = self._write_part(writing, local.storage, name)

        def sync() -> OfRank:
            local.sync(name)
            return of_rank

        def complete(of_ranks: list[OfRank]) -> tuple[dict[str, FileRecord], list[OfRank]]:
            files = self._complete(writer, of_ranks)
            with local.storage.create(f"{name}/{MANIFEST}") as file:
                file.write(writing.make_manifest(files).to_json())
            local.sync(name)
            return files, of_ranks

        files, of_ranks = on_all(self.group, sync, complete)

        def copy() -> Saved:
            saved = copy_and_commit(
                local,
                self.storage,
                name,
                {file: files[file] for file in writer.written},
                group=self.commit_group,
                commit=lambda target: self._commit(writing, target, files, of_ranks),
            )
            local.delete(name)
            return saved

        return copy

    def _write_part(self, writing: "_Writing", storage: Storage, target: str) -> tuple[ShardWriter, OfRank]:
        writer = ShardWriter(
            storage,
            target,
            rank=dist.get_rank(self.group),
            read=lambda item: local_tensor(writing.tensors[item.index.fqn]).cpu(),
        )
        planning = time.perf_counter()
        try:
            dcp.save(writing.state, storage_writer=writer, planner=self.planner, process_group=self.group)
        except CheckpointException as error:
            raise error_of_ranks(error) from None
        times = writing.staging_seconds, writer.started - planning, writer.ended - writer.started
        return writer, (times, writer.written)

    def _copy_on_all(self, staging: Staging) -> dict[str, Tensor]:
        """Return this rank's copy; raises on every rank if it fails on any."""
        staged: list[dict[str, Tensor]] = []
        on_all(self.group, lambda: staged.append(staging.copy()))
        return staged[0]

    @contextlib.contextmanager
    def _discarding_on_error(self, folder: str) -> Iterator[None]:
        """Delete what a failed save has written, so that a full disk has room for the next save."""
        try:
            yield
        except Exception:
            if dist.get_rank(self.group) == 0:
                with contextlib.suppress(Exception):
                    self.storage.discard(folder)
            raise

    def _complete(self, writer: ShardWriter, of_ranks: list[OfRank]) -> dict[str, FileRecord]:
        """Write the last files on rank 0, after every rank has written and synced its part; return all files."""
        written = {name: file for _, files in of_ranks for name, file in files.items()}
        writer.write_file(manifests.CHECKSUMS, checksums_json(written))
        writer.write_file(manifests.CONFIG, self.config.encode())
        return {name: file.record() for name, file in sorted((written | writer.written).items())}

    def _commit(self, writing: "_Writing", target: str, files: dict[str, FileRecord], of_ranks: list[OfRank]) -> Saved:
        """Publish a checkpoint on rank 0, after all its files are in the target folder."""
        check_complete(self.storage, target, files)
        staging, planning, written = (max(column) for column in zip(*(times for times, _ in of_ranks), strict=True))
        manifest = writing.make_manifest(files)
        self.storage.publish(writing.folder, manifest.to_json())
        return Saved(staging, planning, written, time.perf_counter() - writing.started, manifest.size)


@dataclass(frozen=True)
class _Writing:
    """State that is being written, as a checkpoint's folder."""

    state: State
    tensors: dict[str, Tensor]
    folder: str
    make_manifest: MakeManifest
    started: float
    """Time of `time.perf_counter`."""
    staging_seconds: float


def _done(act: Callable[[], T]) -> Future[T]:
    """Call a function now, and return its result or error."""
    done: Future[T] = Future()
    try:
        done.set_result(act())
    except Exception as error:
        done.set_exception(error)
    return done
