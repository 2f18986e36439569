"""Saves beside training: copy the state to host memory, then write the copy in a thread of low priority.

Parameters and moments change only when the optimizer makes a step, so the copy is made during the next forward and
backward; the next optimizer step makes what is left of it. On busy CPUs a thread that writes takes its time from
training. So this thread has a lower priority and computes little: each rank writes its own part of the state, each
tensor has one checksum instead of two, and plans are made once.
"""

import contextlib
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
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.planner import SavePlan

from titanlite.checkpoint import manifest as manifests
from titanlite.checkpoint.dcp_write import ShardWriter, WrittenFile, checksums_json
from titanlite.checkpoint.manifest import FileRecord, Manifest
from titanlite.checkpoint.staging import Staging
from titanlite.checkpoint.state import State, flat
from titanlite.runtime.errors import DamagedCheckpoint, RunError
from titanlite.runtime.private_torch.checkpoint import forget_cached_plans, has_cached_plan, set_plan_cache_key
from titanlite.runtime.private_torch.tensors import local_tensor
from titanlite.runtime.ranks import error_of_ranks, on_all, on_each, on_rank_0
from titanlite.storage.storage import Storage

T = TypeVar("T")
NICE = 10
"""Nice value of the thread: about a tenth of training's share of a core that both want. With much less (SCHED_IDLE,
nice 19), a save beside other busy processes took a minute, and training waited for it."""

MakeManifest = Callable[[dict[str, FileRecord]], Manifest]
"""Makes a manifest from the sizes and checksums of the files."""
OfRank = tuple[tuple[float, float, float], dict[str, WrittenFile]]
"""Seconds of staging, planning and writing of a rank, and the files that it has written."""


@dataclass(frozen=True)
class Saved:
    """Size of a committed checkpoint, and the time of each part of its save: the longest of any rank."""

    staging_seconds: float
    planning_seconds: float
    writing_seconds: float
    total_seconds: float
    bytes: int


class Saver:
    """Writer of one state after another, each rank its part.

    Args:
        group: a gloo group of its own, because another thread than training's uses it.
        device: device of the state.
        pin: stage to pinned memory.
        config: resolved config as TOML, of which each checkpoint keeps a copy.
    """

    def __init__(
        self,
        storage: Storage,
        *,
        group: dist.ProcessGroup,
        device: torch.device,
        pin: bool,
        config: str,
    ) -> None:
        self.storage = storage
        self.group = group
        self.device = device
        self.config = config
        self.planner = CachingPlanner(f"titanlite-{id(self)}")
        self.staging = Staging(device, pin=pin)
        self._thread = ThreadPoolExecutor(1, "checkpoint", initializer=self._start_thread)

    def start(self, state: State, folder: str, make_manifest: MakeManifest, *, background: bool) -> Future[Saved]:
        """Save a state.

        Args:
            make_manifest: called on rank 0.
            background: write a copy in a thread. Otherwise the state itself is written before this returns.

        Returns:
            the result, once the checkpoint is committed. It raises RunError, the same on every rank, if any rank
            fails. Nothing is committed then.
        """
        if background:
            tensors = flat(state)
            self.staging.begin({name: tensors[name] for name in self.planner.written_here(tensors)})
        run = self._thread.submit if background else _done
        return run(lambda: self._save(state, folder, make_manifest, background=background))

    def later(self, act: Callable[[], None]) -> None:
        """Call a function in the thread that saves, after a save in flight."""
        self._thread.submit(act)

    def wait_until_staged(self) -> None:
        """Return when the state may change."""
        self.staging.wait()

    def close(self) -> None:
        self._thread.shutdown(wait=True)
        self.planner.forget()

    def _start_thread(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        if sys.platform == "linux":  # elsewhere, a priority belongs to the process
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)

    def _save(self, state: State, folder: str, make_manifest: MakeManifest, *, background: bool) -> Saved:
        started = time.perf_counter()
        tensors = on_each(self.group, self.staging.copy) if background else flat(state)
        staged = time.perf_counter()
        with self._discarding_on_error(folder):
            target = on_rank_0(self.group, lambda: self.storage.begin(folder))
            writer = ShardWriter(
                self.storage,
                target,
                rank=dist.get_rank(self.group),
                read=lambda item: local_tensor(tensors[item.index.fqn]).cpu(),
            )
            planning = time.perf_counter()
            try:
                dcp.save(state, storage_writer=writer, planner=self.planner, process_group=self.group)
            except CheckpointException as error:
                raise error_of_ranks(error) from None
            times = staged - started, writer.started - planning, writer.ended - writer.started

            def commit(of_ranks: list[OfRank]) -> Saved:
                """Write the last files on rank 0, after every rank has written and synced its part, and publish."""
                written = {name: file for _, files in of_ranks for name, file in files.items()}
                writer.write_file(manifests.CHECKSUMS, checksums_json(written))
                writer.write_file(manifests.CONFIG, self.config.encode())
                files = {name: file.record() for name, file in sorted((written | writer.written).items())}
                manifest = make_manifest(files)
                try:
                    manifests.check_sizes(self.storage, target, manifest, self.storage.list().get(target, {}))
                except DamagedCheckpoint as missing:
                    raise RunError(f"{missing}. All nodes must share the folder of checkpoints") from None
                self.storage.publish(folder, manifest.to_json())
                staging, planning, writing = (
                    max(column) for column in zip(*(names for names, _ in of_ranks), strict=True)
                )
                return Saved(staging, planning, writing, time.perf_counter() - started, manifest.size)

            return on_all(self.group, lambda: (times, writer.written), commit)

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


def _done(act: Callable[[], T]) -> Future[T]:
    """Call a function now, and return its result or error."""
    done: Future[T] = Future()
    try:
        done.set_result(act())
    except Exception as error:
        done.set_exception(error)
    return done


# Plans that are made once: names, shapes and places are the same at each save.


Shapes = dict[str, tuple[torch.Size, torch.dtype]]


class CachingPlanner(DefaultSavePlanner):
    """Planner that plans again only when a name, shape or dtype has changed.

    DCP's own cache still makes a new plan at each save, to compare. This planner compares shapes instead.

    Args:
        key: entry in DCP's cache of plans.
    """

    def __init__(self, key: str) -> None:
        super().__init__(enable_plan_caching=True)
        self.key = key
        set_plan_cache_key(self, key)
        self._shapes: Shapes = {}
        self._is_unchanged = False
        self._planned: set[str] | None = None
        """Names that this rank writes, once they are planned."""

    def written_here(self, tensors: dict[str, Tensor]) -> set[str]:
        """Return the names that this rank writes; all of them before they are planned."""
        return self._planned if self._planned is not None and _shapes(tensors) == self._shapes else {*tensors}

    def set_up_planner(
        self, state_dict: Any, storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        shapes = _shapes(flat(state_dict))
        self._is_unchanged = shapes == self._shapes and has_cached_plan(self.key)
        self._shapes = shapes
        if not self._is_unchanged:
            super().set_up_planner(state_dict, storage_meta, is_coordinator)

    def create_local_plan(self) -> SavePlan:
        return SavePlan([], usable=False) if self._is_unchanged else super().create_local_plan()

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        plan = super().finish_plan(new_plan)
        self._planned = {item.index.fqn for item in plan.items}
        return plan

    def forget(self) -> None:
        """Delete the cached plans."""
        forget_cached_plans(self.key)


def _shapes(tensors: dict[str, Tensor]) -> Shapes:
    return {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
