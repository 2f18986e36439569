"""Writes checkpoints beside training: copy the state to host memory, then write the copy in a thread of low priority.

Parameters and moments change only when the optimizer makes a step, so the copy is made during the next forward and
backward; the next optimizer step makes what is left of it. On busy CPUs a thread that writes beside training gains
little: what it computes, training does not. So this one comes after training, and computes as little as it can: each
rank its own part of the state, one checksum instead of two, plans and the frames of small tensors made once.
"""

import contextlib
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future as TorchFuture

from titanlite.checkpoint import manifest as manifests
from titanlite.checkpoint.dcp import Frames, ShardWriter, Written, checksums_json
from titanlite.checkpoint.manifest import FileRecord, Manifest
from titanlite.checkpoint.state import State, flat
from titanlite.checkpoint.storage import Storage
from titanlite.runtime.private_torch import local_tensor
from titanlite.runtime.ranks import cause, on_all, on_rank_0

NICE = 10
"""About a tenth of the share that training has on a core that both want. With much less (SCHED_IDLE, nice 19), a save
beside other busy processes took a minute, and training waited for it."""


@dataclass(frozen=True)
class Saved:
    """Of a checkpoint that is committed: seconds of its parts, the most of any rank, and its size."""

    staging_seconds: float
    planning_seconds: float
    writing_seconds: float
    total_seconds: float
    bytes: int


class Saver:
    """Writes one state after another, each rank its part.

    Args:
        group: gloo, and nobody else's: it is used in another thread than training.
        device: of the state.
        pin: stage to pinned memory, from which a GPU copies faster and without waiting.
    """

    def __init__(self, storage: Storage, *, group: dist.ProcessGroup, device: torch.device, pin: bool) -> None:
        self.storage = storage
        self.group = group
        self.device = device
        self.frames = Frames()
        self.planner = _CachingPlanner(f"titanlite-{id(self)}")
        self.staging = _Staging(device, pin=pin)
        self._thread = ThreadPoolExecutor(1, "checkpoint", initializer=self._start_thread)

    def start(
        self,
        state: State,
        folder: str,
        manifest: Callable[[dict[str, FileRecord]], Manifest],
        *,
        background: bool,
    ) -> Future[Saved]:
        """Save a state.

        Args:
            manifest: of the files with these sizes and checksums; called on rank 0.
            background: write a copy in a thread. Otherwise all is done on return, from the state itself.

        The result raises RunError, the same on every rank, if any rank fails; nothing is committed then.
        """
        if not background:
            done: Future[Saved] = Future()
            try:
                done.set_result(self._save(state, folder, manifest, staging=None))
            except Exception as error:
                done.set_exception(error)
            return done
        tensors = flat(state)
        self.staging.begin({name: tensors[name] for name in self.planner.written_here(tensors)})
        return self._thread.submit(self._save, state, folder, manifest, staging=self.staging)

    def later(self, act: Callable[[], None]) -> None:
        """Do something after what is being written."""
        self._thread.submit(act)

    def wait_until_staged(self) -> None:
        """The state may change after this."""
        self.staging.wait()

    def close(self) -> None:
        self._thread.shutdown(wait=True)
        self.planner.forget()

    def _start_thread(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        if sys.platform == "linux":  # where priority is a thread's
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)

    def _save(
        self,
        state: State,
        folder: str,
        manifest: Callable[[dict[str, FileRecord]], Manifest],
        *,
        staging: "_Staging | None",
    ) -> Saved:
        with self._leaving_nothing(folder):
            started = time.perf_counter()
            tensors = flat(state) if staging is None else on_all_mine(self.group, staging.copy)
            staged = time.perf_counter()
            writer = _TimedWriter(
                self.storage,
                on_rank_0(self.group, lambda: self.storage.begin(folder)),
                rank=dist.get_rank(self.group),
                frames=self.frames,
                read=lambda item: local_tensor(tensors[item.index.fqn]).cpu(),
            )
            planning = time.perf_counter()
            try:
                dcp.save(state, storage_writer=writer, planner=self.planner, process_group=self.group)
            except CheckpointException as error:
                raise cause(error) from None
            times = staged - started, writer.began - planning, writer.ended - writer.began
            return on_all(
                self.group,
                lambda: (times, writer.written),
                lambda of_ranks: self._commit(writer, folder, of_ranks, manifest, started),
            )

    @contextlib.contextmanager
    def _leaving_nothing(self, folder: str) -> Iterator[None]:
        """Of a save that fails: a full disk has room for the next one, then."""
        try:
            yield
        except Exception:
            if dist.get_rank(self.group) == 0:
                with contextlib.suppress(Exception):
                    self.storage.discard(folder)
            raise

    def _commit(
        self,
        writer: ShardWriter,
        folder: str,
        of_ranks: list[tuple[tuple[float, float, float], dict[str, Written]]],
        manifest: Callable[[dict[str, FileRecord]], Manifest],
        started: float,
    ) -> Saved:
        """On rank 0: everything is written and synced; now make it count."""
        written = {name: file for _, files in of_ranks for name, file in files.items()}
        writer.write_file(manifests.CHECKSUMS, checksums_json(written))
        written |= writer.written
        there = self.storage.list().get(writer.folder, {})
        for name, file in written.items():
            if there.get(name) != file.size:
                where = self.storage.url_of(f"{writer.folder}/{name}")
                what = "is missing" if name not in there else f"has {there[name]} bytes instead of {file.size}"
                raise OSError(f"{where} {what}. All nodes must share the folder of checkpoints")
        staging, planning, writing = (max(column) for column in zip(*(times for times, _ in of_ranks), strict=True))
        record = manifest({name: file.record() for name, file in sorted(written.items())})
        self.storage.publish(folder, record.to_json())
        return Saved(staging, planning, writing, time.perf_counter() - started, record.size)


def on_all_mine(group: dist.ProcessGroup, act: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
    """Do it on every rank; raises on every rank if it fails on any."""
    mine: list[dict[str, Tensor]] = []
    on_all(group, lambda: mine.append(act()))
    return mine[0]


class _Staging:
    """A copy of the state in host memory. The memory is kept for the next copy: it is taken once, and does not grow."""

    def __init__(self, device: torch.device, *, pin: bool) -> None:
        self.pin = pin
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._buffers: dict[str, Tensor] = {}
        self._to_copy: deque[tuple[Tensor, Tensor]] = deque()
        self._lock = threading.Lock()
        self._is_due = False
        self._error: Exception | None = None

    def begin(self, tensors: dict[str, Tensor]) -> None:
        """A copy of these, as they are now, is to come; on a GPU, as they are when the work queued so far is done."""
        self._is_due, self._error = True, None
        sources = {name: local_tensor(tensor) for name, tensor in tensors.items()}
        try:
            self._buffers = {name: self._buffer(name, source) for name, source in sources.items()}
        except Exception as error:  # no memory: `copy` tells it, and all ranks hear of it
            self._error = error
            return
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream())
        self._to_copy.extend((self._buffers[name], source) for name, source in sources.items())

    def copy(self) -> dict[str, Tensor]:
        """In the thread that writes: make the copy."""
        self._copy_all()
        if self._error is not None:
            raise self._error
        if self.stream is not None:
            self.stream.synchronize()
        return self._buffers

    def wait(self) -> None:
        """In the training thread, before the state changes: lend a hand with what is not copied yet."""
        if not self._is_due:
            return
        self._is_due = False
        self._copy_all()
        if self.stream is not None:  # the copies are queued: let the next change of the state queue behind them
            torch.cuda.current_stream().wait_stream(self.stream)

    def _copy_all(self) -> None:
        with torch.cuda.stream(self.stream) if self.stream else contextlib.nullcontext():
            while True:
                with self._lock:  # so that nothing is under way when the other thread finds nothing left
                    if not self._to_copy:
                        return
                    try:
                        _copy(*self._to_copy.popleft())
                    except Exception as error:  # of the save, not of training, whichever thread met it
                        self._error = error
                        self._to_copy.clear()

    def _buffer(self, name: str, tensor: Tensor) -> Tensor:
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=self.pin)
        return buffer


def _copy(target: Tensor, source: Tensor) -> None:
    if source.device.type != "cpu" or not source.is_contiguous():
        target.copy_(source, non_blocking=True)
    elif source.numel():  # by NumPy, in this thread: PyTorch would start more threads, with training's priority
        np.copyto(target.view(-1).view(torch.uint8).numpy(), source.reshape(-1).view(torch.uint8).numpy())


class _CachingPlanner(DefaultSavePlanner):
    """DCP's planner with its cache on: names, shapes and places are the same at each save, so plans are made and sent
    around once. The cache is a class's, found by this key. DCP still makes a plan to compare; this compares shapes."""

    def __init__(self, key: str) -> None:
        super().__init__(enable_plan_caching=True)
        self._cached_plans_key = key
        self._shapes: dict[str, tuple[Any, ...]] = {}
        self._is_unchanged = False
        self.mine: set[str] | None = None
        """Names that this rank writes, once they are planned."""

    def written_here(self, tensors: dict[str, Tensor]) -> set[str]:
        """What this rank will write, if it is known; or all."""
        return self.mine if self.mine is not None and _shapes(tensors) == self._shapes else {*tensors}

    def set_up_planner(
        self, state_dict: Any, storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        shapes = _shapes(flat(state_dict))
        self._is_unchanged = shapes == self._shapes and self._cached_plans_key in SavePlanner._cached_save_plan
        self._shapes = shapes
        if not self._is_unchanged:
            super().set_up_planner(state_dict, storage_meta, is_coordinator)

    def create_local_plan(self) -> SavePlan:
        return SavePlan([], usable=False) if self._is_unchanged else super().create_local_plan()

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        plan = super().finish_plan(new_plan)
        self.mine = {item.index.fqn for item in plan.items}
        return plan

    def forget(self) -> None:
        for cache in (
            SavePlanner._cached_save_plan,
            SavePlanner._cached_final_save_plan,
            SavePlanner._cached_all_plans,
            SavePlanner._cached_global_plan,
            SavePlanner._cached_metadata,
        ):
            cache.pop(self._cached_plans_key, None)


def _shapes(tensors: dict[str, Tensor]) -> dict[str, tuple[Any, ...]]:
    return {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}


class _TimedWriter(ShardWriter):
    began = ended = 0.0

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> TorchFuture[list[WriteResult]]:
        self.began = time.perf_counter()
        results = super().write_data(plan, planner)
        self.ended = time.perf_counter()
        return results
