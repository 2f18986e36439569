"""Writing by DCP: one file a rank with checksums, and plans that are made once.

Plain DCP can read the result: a file holds tensors as `torch.save` writes them, one after another, and .metadata is a
pickle of their places. Each file has a checksum of the whole, and one of its beginning up to the end of each tensor. A
CRC-32 can be continued from any of those, so a reader checks one tensor without reading the others.
"""

import hashlib
import io
import json
import time
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cache
from typing import IO, Any, BinaryIO, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.state_dict_saver import save  # pyright: ignore[reportUnknownVariableType]
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future
from torch.utils.serialization import config as serialization

from titanlite.checkpoint import manifest as manifests
from titanlite.checkpoint.manifest import FileRecord, Manifest
from titanlite.runtime.errors import DamagedCheckpoint, RunError
from titanlite.runtime.files import write_all
from titanlite.runtime.private_torch.checkpoint import (
    StorageInfo,
    forget_cached_plans,
    has_cached_plan,
    pickle_metadata,
    set_plan_cache_key,
)
from titanlite.runtime.ranks import calling_dcp
from titanlite.state import State, flat
from titanlite.storage.storage import Storage
from titanlite.version import __version__

PIECE = 1 << 18
"""Bytes that are written at once."""


@dataclass
class WrittenFile:
    """Size and checksums of a file that a rank has written."""

    size: int = 0
    crc32: int = 0
    ends: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    """Pairs (offset of a tensor's end, checksum of the file up to there)."""

    def write(self, data: bytes | memoryview, target: BinaryIO) -> None:
        """Write to a file, and count and sum what is written."""
        for start in range(0, len(data), PIECE):  # small enough to be in the processor's cache both times
            piece = data[start : start + PIECE]
            write_all(target, piece)
            self.crc32 = zlib.crc32(piece, self.crc32)
        self.size += len(data)

    def record(self) -> FileRecord:
        return FileRecord(self.size, f"{self.crc32:08x}")


class _Gap(io.RawIOBase):
    """Stream that keeps what is written to it before and after the gap that `skip_data` leaves, by a seek."""

    def __init__(self) -> None:
        self.before, self.after = bytearray(), bytearray()
        self._part = self.before

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._part += data
        return len(data)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._part = self.after
        return offset


@cache
def around_data(shape: torch.Size, dtype: torch.dtype) -> tuple[bytes, bytes]:
    """Return what `torch.save` writes before and after the elements of a contiguous tensor. Other tensors of the same
    shape have the same, and pickling each of them anew takes longer than writing it."""
    gap = _Gap()
    no_other_checksums = serialization.patch("save.compute_crc32", False)  # pyright: ignore
    with no_other_checksums, torch.serialization.skip_data():
        torch.save(torch.empty(shape, dtype=dtype), cast(IO[bytes], gap))
    return bytes(gap.before), bytes(gap.after)


WrittenFiles = dict[str, WrittenFile]
"""Files that were written, by name."""


class ShardWriter(StorageWriter):
    """Writer of this rank's part of a state, and on rank 0 of the files that concern all ranks.

    Args:
        folder: staging folder.
        rank: in the group that saves.
        read: returns the part of a tensor that this rank has, by name, on the CPU.
    """

    def __init__(self, storage: Storage, folder: str, rank: int, read: Callable[[str], Tensor]) -> None:
        self.storage = storage
        self.folder = folder
        self.read = read
        self.name = f"__{rank}_0.distcp"
        self.written: WrittenFiles = {}
        self.reserved = 0
        """Bytes to reserve for the file of this rank."""
        self.planning_seconds = self.writing_seconds = 0.0
        self._opened = time.perf_counter()

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results: Future[list[WriteResult]] = Future()
        name = f"{self.folder}/{self.name}"
        started = time.perf_counter()
        # A retry writes the file anew from its first byte: the state is still in memory.
        results.set_result(self.storage.retry(lambda: self._write(plan.items), name) if plan.items else [])
        self.planning_seconds, self.writing_seconds = started - self._opened, time.perf_counter() - started
        return results

    def size_of(self, items: list[WriteItem]) -> int:
        """Return the bytes of the file of this rank."""
        tensors = (self.read(item.index.fqn) for item in items)
        return sum(sum(map(len, around_data(tensor.shape, tensor.dtype))) + tensor.nbytes for tensor in tensors)

    def _write(self, items: list[WriteItem]) -> list[WriteResult]:
        results: list[WriteResult] = []
        written = WrittenFile()
        with self.storage.create(f"{self.folder}/{self.name}", self.reserved) as file:
            for item in items:
                start, tensor = written.size, self.read(item.index.fqn).contiguous()
                before, after = around_data(tensor.shape, tensor.dtype)
                written.write(before, file)
                if tensor.numel():
                    written.write(tensor.view(-1).view(torch.uint8).numpy().data, file)
                written.write(after, file)
                written.ends.append((written.size, written.crc32))
                length = written.size - start
                where = StorageInfo(self.name, start, length)
                results.append(WriteResult(index=item.index, size_in_bytes=length, storage_data=where))
        self.written[self.name] = written
        return results

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        metadata.storage_data = {result.index: result.storage_data for of_rank in results for result in of_rank}
        metadata.storage_meta = StorageMeta()
        self.write_file(manifests.METADATA, pickle_metadata(metadata))

    def write_file(self, name: str, data: bytes) -> None:
        """Write a small file; it is durable on return."""

        def write() -> None:
            with self.storage.create(f"{self.folder}/{name}") as file:
                write_all(file, data)

        self.storage.retry(write, f"{self.folder}/{name}")
        self.written[name] = WrittenFile(len(data), zlib.crc32(data))

    def complete(
        self, draft: Manifest, config: str, *, started: float, others: Iterable[WrittenFiles] = ()
    ) -> Manifest:
        """Write the files that concern all ranks, and return the manifest, which is ready to be published.

        Args:
            draft: manifest without what this writer knows.
            config: TOML of which the checkpoint keeps a copy.
            started: when the save began, by `time.perf_counter`.
            others: files that other ranks have written.
        """
        for files in others:
            self.written |= files
        shards = {name: file.ends for name, file in self.written.items() if file.ends}
        sums = {name: [[end, f"{crc:08x}"] for end, crc in ends] for name, ends in shards.items()}
        self.write_file(manifests.CHECKSUMS, json.dumps(sums).encode())
        self.write_file(manifests.CONFIG, config.encode())
        return replace(
            draft,
            config_hash=hashlib.sha256(config.encode()).hexdigest(),
            versions={"titanlite": __version__, "torch": torch.__version__},
            files={name: file.record() for name, file in sorted(self.written.items())},
            saved_at=time.time(),
            elapsed_seconds=time.perf_counter() - started,
        )

    def check_sizes(self, manifest: Manifest) -> None:
        """Check that the files of all ranks are there, with their sizes.

        Raises:
            RunError: a file is missing.
        """
        try:
            manifests.check_sizes(self.storage, self.folder, manifest, self.storage.list().get(self.folder, {}))
        except DamagedCheckpoint as missing:
            raise RunError(f"{missing}. All nodes must share the folder of checkpoints") from None

    def reset(self, checkpoint_id: object = None) -> None: ...

    def set_up_storage_writer(self, is_coordinator: bool, *args: object, **kwargs: object) -> None: ...

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: object) -> bool:
        return True


def write_state(
    state: State, writer: StorageWriter, planner: SavePlanner | None = None, group: dist.ProcessGroup | None = None
) -> None:
    """Write a state, each rank of a group its own part; without a group, this process writes all of it.

    Raises:
        UserError, RunError: of any rank, the same on every rank.
    """
    with calling_dcp(group):
        save({**state}, storage_writer=writer, planner=planner, process_group=group, no_dist=group is None)


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
        self, state_dict: State, storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        shapes = _shapes(flat(state_dict))
        self._is_unchanged = shapes == self._shapes and has_cached_plan(self.key)
        self._shapes = shapes
        if not self._is_unchanged:
            super().set_up_planner(state_dict, storage_meta, is_coordinator)  # pyright: ignore[reportUnknownMemberType]

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
