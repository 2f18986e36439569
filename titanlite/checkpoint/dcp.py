"""How DCP writes and reads the shards of a checkpoint: one file a rank, with checksums, and never running code from it.

DCP plans what each rank writes and reads. Here are its two ends, a StorageWriter and a StorageReader. What they write,
plain DCP reads: tensors by torch.save one after another in a file, and .metadata, a pickle that says which is where.

Beside a checksum of each whole file there are those of its beginning up to the end of each tensor. A CRC-32 can be
carried on from any of them, so that a tensor is checked by reading that tensor alone, in the same pass that loads it.
"""

import io
import json
import pickle
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, BinaryIO, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future
from torch.utils.serialization import config as serialization

from titanlite.checkpoint import manifest as manifests
from titanlite.checkpoint.manifest import FileRecord, Manifest
from titanlite.checkpoint.storage import Storage
from titanlite.checkpoint.unpickle import Forbidden, MetadataUnpickler
from titanlite.runtime.errors import DamagedCheckpoint, RunError, UserError

BUFFER = 1 << 20


class UnsafeCheckpoint(UserError):
    """A checkpoint holds more than tensors: loading it could run code. Nothing of it was run."""


@dataclass
class Written:
    """A file that a rank has written."""

    size: int = 0
    crc32: int = 0
    ends: list[tuple[int, int]] = field(default_factory=list)
    """Of each tensor: (offset of its end, checksum of the file up to there)."""

    def record(self) -> FileRecord:
        return FileRecord(self.size, f"{self.crc32:08x}")


class _ChecksumStream(io.RawIOBase):
    """Passes on what is written to it, and counts and sums it."""

    def __init__(self, target: BinaryIO) -> None:
        self.target = target
        self.written = Written()

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        view = memoryview(data)
        done = 0
        while done < len(view):  # a write to disk may take less than it is given
            done += self.target.write(view[done:])
        self.written.crc32 = zlib.crc32(view, self.written.crc32)
        self.written.size += len(view)
        return len(view)


class Frames:
    """What torch.save writes before and after the data of a tensor, for tensors of up to a MiB.

    It depends on shape and type alone, and making it takes Python longer than all else of a small tensor's save: time
    in which training, in the other thread, could not run. Two tensors of different data show that it does not depend
    on them; should it, in some version of PyTorch, torch.save is used.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[torch.Size, torch.dtype], tuple[bytes, bytes] | None] = {}

    def around(self, tensor: Tensor) -> tuple[bytes, bytes] | None:
        if not 0 < tensor.nbytes <= BUFFER or not tensor.is_contiguous():
            return None
        key = tensor.shape, tensor.dtype
        if key not in self._known:
            one, other = _frame(tensor, 0xA5), _frame(tensor, 0xC3)
            self._known[key] = one if one == other else None
        return self._known[key]


def _frame(like: Tensor, value: int) -> tuple[bytes, bytes] | None:
    """Before and after the data in the archive of a tensor whose every byte has this value."""
    tensor = torch.empty_like(like)
    tensor.view(-1).view(torch.uint8).fill_(value)
    archive = io.BytesIO()
    torch.save(tensor, archive)
    data = bytes([value]) * like.nbytes
    before, found, after = archive.getvalue().partition(data)
    return (before, after) if found and data not in after else None


def _bytes_of(tensor: Tensor) -> memoryview:
    return tensor.view(-1).view(torch.uint8).numpy().data


class ShardWriter(StorageWriter):
    """Writes this rank's part of a state.

    Args:
        folder: in which the files are staged.
        rank: in the group that saves.
        frames: kept from save to save.
        read: the tensor, on the CPU, that a planned item stands for.
    """

    def __init__(
        self, storage: Storage, folder: str, *, rank: int, frames: "Frames", read: Callable[[WriteItem], Tensor]
    ) -> None:
        self.frames = frames
        self.storage = storage
        self.folder = folder
        self.read = read
        self.name = f"__{rank}_0.distcp"
        self.written: dict[str, Written] = {}

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results: Future[list[WriteResult]] = Future()
        name = f"{self.folder}/{self.name}"
        # Tried again, a file is written anew from its first byte: the state is still there.
        results.set_result(self.storage.retry(lambda: self._write(plan.items), name) if plan.items else [])
        return results

    def _write(self, items: list[WriteItem]) -> list[WriteResult]:
        results = []
        no_other_checksums = serialization.patch("save.compute_crc32", False)  # pyright: ignore
        with no_other_checksums, self.storage.create(f"{self.folder}/{self.name}") as file:
            raw = _ChecksumStream(file)
            stream = io.BufferedWriter(cast(io.RawIOBase, raw), BUFFER)
            written = raw.written
            for item in items:
                start = written.size
                tensor = self.read(item)
                if tensor.untyped_storage().nbytes() != tensor.nbytes:
                    tensor = tensor.clone()  # torch.save would write all of the memory that it is a part of
                frame = self.frames.around(tensor)
                if frame is None:
                    torch.save(tensor, stream)
                else:
                    stream.write(frame[0])
                    stream.write(_bytes_of(tensor))
                    stream.write(frame[1])
                stream.flush()
                written.ends.append((written.size, written.crc32))
                length = written.size - start
                where = filesystem._StorageInfo(self.name, start, length)
                results.append(WriteResult(index=item.index, size_in_bytes=length, storage_data=where))
        self.written[self.name] = written
        return results

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        metadata.storage_data = {result.index: result.storage_data for of_rank in results for result in of_rank}
        metadata.storage_meta = StorageMeta()
        self.write_file(manifests.METADATA, pickle.dumps(metadata))

    def write_file(self, name: str, data: bytes) -> None:
        """A small file, durable on return."""

        def write() -> None:
            with self.storage.create(f"{self.folder}/{name}") as file:
                file.write(data)

        self.storage.retry(write, f"{self.folder}/{name}")
        self.written[name] = Written(len(data), zlib.crc32(data))

    def reset(self, checkpoint_id: Any = None) -> None: ...

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None: ...

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


class ShardReader(StorageReader):
    """Reads what this rank needs of a checkpoint, and checks it in the same pass.

    Raises (from the constructor, and while loading):
        DamagedCheckpoint: a file is not as it was written.
        UnsafeCheckpoint: it holds something else than tensors.
    """

    def __init__(self, storage: Storage, folder: str, manifest: Manifest, *, checksums: bool) -> None:
        self.storage = storage
        self.folder = folder
        self.manifest = manifest
        self.metadata = self._read_metadata()
        self.ends: dict[str, dict[int, int]] | None = None
        if checksums:
            listed = json.loads(self._read_small(manifests.CHECKSUMS))
            self.ends = {
                name: {0: 0, **{offset: int(crc, 16) for offset, crc in ends}} for name, ends in listed.items()
            }

    def _read_metadata(self) -> Metadata:
        data = self._read_small(manifests.METADATA)
        where = self.storage.url_of(f"{self.folder}/{manifests.METADATA}")
        try:
            found = MetadataUnpickler(io.BytesIO(data)).load()
        except Forbidden as error:
            message = f"{where} names {error}, which is no part of a checkpoint: refused, nothing was run"
            raise UnsafeCheckpoint(message) from None
        except Exception as error:  # a pickle of anything can fail in any way
            raise UnsafeCheckpoint(f"{where} is not the metadata of a checkpoint: refused ({error!r})") from None
        if not isinstance(found, Metadata):
            raise UnsafeCheckpoint(f"{where} is not the metadata of a checkpoint: refused")
        self._check_places(found, where)
        return found

    def _check_places(self, found: Metadata, where: str) -> None:
        """Everything is a tensor, whole, in a file that the manifest lists: DCP would leave out what has no place."""
        places = found.storage_data or {}
        for index, info in places.items():
            entry = found.state_dict_metadata.get(index.fqn)
            if not isinstance(entry, TensorStorageMetadata) or info.transform_descriptors:
                raise UnsafeCheckpoint(f"{where}: {index.fqn} is not a tensor: refused, nothing was run")
            if info.relative_path not in self.manifest.files:
                raise UnsafeCheckpoint(f"{where} names {info.relative_path}, which the manifest does not: refused")
            if not 0 <= info.offset <= info.offset + info.length <= self.manifest.files[info.relative_path].size:
                raise UnsafeCheckpoint(f"{where}: {index.fqn} lies outside of {info.relative_path}: refused")
        self.chunks: dict[MetadataIndex, torch.Size] = {}
        for name, entry in found.state_dict_metadata.items():
            if not isinstance(entry, TensorStorageMetadata):
                raise UnsafeCheckpoint(f"{where}: {name} is not a tensor: refused, nothing was run")
            chunks = {MetadataIndex(name, part.offsets): part.sizes for part in entry.chunks}
            if not chunks.keys() <= places.keys() or sum(map(torch.Size.numel, chunks.values())) != entry.size.numel():
                raise UnsafeCheckpoint(f"{where}: {name} is not there whole: refused")
            self.chunks |= chunks

    def _read_small(self, name: str) -> bytes:
        return manifests.read_checked(self.storage, self.folder, name, self.manifest)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self.metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        info = {id(item): self.metadata.storage_data[item.storage_index] for item in plan.items}
        for item in sorted(plan.items, key=lambda item: (info[id(item)].relative_path, info[id(item)].offset)):
            assert item.type == LoadItemType.TENSOR
            stored = self._read_tensor(item, info[id(item)])
            for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                stored = stored.narrow(dim, start, length)
            target = planner.resolve_tensor(item).detach()
            target.copy_(stored)
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read_tensor(self, item: ReadItem, info: Any) -> Tensor:
        name = f"{self.folder}/{info.relative_path}"
        where = f"{self.storage.url_of(name)} ({item.storage_index.fqn})"
        try:
            data = self.storage.read(name, info.offset, info.length)
        except FileNotFoundError:
            raise DamagedCheckpoint(f"{where} is missing") from None
        if self.ends is not None:
            ends = self.ends.get(info.relative_path, {})
            before, after = ends.get(info.offset), ends.get(info.offset + info.length)
            if before is None or zlib.crc32(data, before) != after:
                raise DamagedCheckpoint(f"{where}: its checksum does not fit")
        try:
            tensor = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        except pickle.UnpicklingError:
            raise UnsafeCheckpoint(f"{where} is not a tensor: refused, nothing was run") from None
        except Exception as error:
            message = f"{where}: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
            if self.ends is not None or isinstance(error, MemoryError):  # its checksum fits: it is not damaged
                raise RunError(message) from error
            raise DamagedCheckpoint(message) from None
        if not isinstance(tensor, Tensor):
            raise UnsafeCheckpoint(f"{where} is not a tensor: refused")
        chunk = self.chunks[item.storage_index]
        if tensor.shape != chunk:
            raise UnsafeCheckpoint(f"{where} has shape {[*tensor.shape]} and not {[*chunk]}: refused")
        return tensor

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None: ...

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def reset(self, checkpoint_id: Any = None) -> None: ...

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


def checksums_json(written: dict[str, Written]) -> bytes:
    return json.dumps(
        {name: [[offset, f"{crc:08x}"] for offset, crc in file.ends] for name, file in written.items() if file.ends}
    ).encode()
