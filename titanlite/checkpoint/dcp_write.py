"""DCP's StorageWriter: one file a rank, with checksums.

Plain DCP reads the result: tensors by torch.save, one after another in a file, and .metadata, a pickle of their places.
Beside the checksum of each whole file there are those of its beginning up to the end of each tensor. A CRC-32 can be
continued from any of them, so a reader checks one tensor by reading that tensor alone.
"""

import io
import json
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, BinaryIO, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future
from torch.utils.serialization import config as serialization

from titanlite.checkpoint import manifest as manifests
from titanlite.checkpoint.manifest import FileRecord
from titanlite.runtime.files import write_all
from titanlite.runtime.private_torch.checkpoint import StorageInfo, pickle_metadata
from titanlite.storage.storage import Storage

BUFFER = 1 << 20


@dataclass
class WrittenFile:
    """Size and checksums of a file that a rank has written."""

    size: int = 0
    crc32: int = 0
    ends: list[tuple[int, int]] = field(default_factory=list)
    """Pairs (offset of a tensor's end, checksum of the file up to there)."""

    def record(self) -> FileRecord:
        return FileRecord(self.size, f"{self.crc32:08x}")


class ChecksumStream(io.RawIOBase):
    """Stream that counts and sums what it passes on to another one."""

    def __init__(self, target: BinaryIO) -> None:
        self.target = target
        self.written = WrittenFile()

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        view = memoryview(data)
        write_all(self.target, view)
        self.written.crc32 = zlib.crc32(view, self.written.crc32)
        self.written.size += len(view)
        return len(view)


class ShardWriter(StorageWriter):
    """Writer of this rank's part of a state.

    Args:
        folder: staging folder.
        rank: in the group that saves.
        read: returns the tensor of a planned item, on the CPU.
    """

    def __init__(self, storage: Storage, folder: str, *, rank: int, read: Callable[[WriteItem], Tensor]) -> None:
        self.storage = storage
        self.folder = folder
        self.read = read
        self.name = f"__{rank}_0.distcp"
        self.written: dict[str, WrittenFile] = {}
        self.started = self.ended = 0.0
        """Times of `write_data`, of `time.perf_counter`."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results: Future[list[WriteResult]] = Future()
        name = f"{self.folder}/{self.name}"
        self.started = time.perf_counter()
        # A retry writes the file anew from its first byte: the state is still in memory.
        results.set_result(self.storage.retry(lambda: self._write(plan.items), name) if plan.items else [])
        self.ended = time.perf_counter()
        return results

    def _write(self, items: list[WriteItem]) -> list[WriteResult]:
        results = []
        no_other_checksums = serialization.patch("save.compute_crc32", False)  # pyright: ignore
        with no_other_checksums, self.storage.create(f"{self.folder}/{self.name}") as file:
            raw = ChecksumStream(file)
            stream = io.BufferedWriter(cast(io.RawIOBase, raw), BUFFER)
            written = raw.written
            for item in items:
                start = written.size
                tensor = self.read(item)
                if tensor.untyped_storage().nbytes() != tensor.nbytes:
                    tensor = tensor.clone()  # torch.save writes the whole storage of a view
                torch.save(tensor, stream)
                stream.flush()
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

    def reset(self, checkpoint_id: Any = None) -> None: ...

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None: ...

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


def checksums_json(written: dict[str, WrittenFile]) -> bytes:
    """Return the text of checksums.json."""
    return json.dumps(
        {name: [[offset, f"{crc:08x}"] for offset, crc in file.ends] for name, file in written.items() if file.ends}
    ).encode()
