"""DCP's StorageReader: checks what it reads in the same pass, and runs no code from a checkpoint."""

import io
import json
import pickle
import zlib
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner
from torch.futures import Future

from titanlite.checkpoint import manifest as manifests
from titanlite.checkpoint.coverage import Piece, find_fault
from titanlite.checkpoint.manifest import Manifest
from titanlite.checkpoint.rank_reader import RankReader
from titanlite.storage.storage import Storage
from titanlite.checkpoint.unpickle import Forbidden, MetadataUnpickler
from titanlite.runtime.errors import DamagedCheckpoint, RunError, UserError


class UnsafeCheckpoint(UserError):
    """A checkpoint holds more than tensors, and loading it could run code. Nothing of it was run."""


class ShardReader(RankReader):
    """Reader of what this rank needs from a checkpoint.

    Every file and tensor that it reads is checked by its checksum.

    Raises (from the constructor, and while loading):
        DamagedCheckpoint: a file has changed since it was written.
        UnsafeCheckpoint: the checkpoint holds more than tensors.
    """

    def __init__(self, storage: Storage, folder: str, manifest: Manifest) -> None:
        self.storage = storage
        self.folder = folder
        self.manifest = manifest
        self.metadata = self._read_metadata()
        listed = json.loads(self._read_small(manifests.CHECKSUMS))
        self.ends = {name: {0: 0, **{offset: int(crc, 16) for offset, crc in ends}} for name, ends in listed.items()}
        """CRC-32 of each file up to the end of each tensor."""

    def _read_metadata(self) -> Metadata:
        data = self._read_small(manifests.METADATA)
        where = self.storage.url_of(f"{self.folder}/{manifests.METADATA}")
        try:
            found = MetadataUnpickler(io.BytesIO(data)).load()
        except Forbidden as error:
            message = f"{where} names {error}, which is no part of a checkpoint: refused, nothing was run"
            raise UnsafeCheckpoint(message) from None
        except Exception as error:  # an arbitrary pickle can fail in any way
            raise UnsafeCheckpoint(f"{where} is not the metadata of a checkpoint: refused ({error!r})") from None
        if not isinstance(found, Metadata):
            raise UnsafeCheckpoint(f"{where} is not the metadata of a checkpoint: refused")
        self._check_places(found, where)
        return found

    def _check_places(self, found: Metadata, where: str) -> None:
        """Check that every entry is a whole tensor in a file of the manifest: DCP skips entries without a place."""
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
            fault = find_fault(entry.size, [Piece(part.offsets, part.sizes) for part in entry.chunks])
            if not chunks.keys() <= places.keys() or fault:
                raise UnsafeCheckpoint(f"{where}: {name} is not complete ({fault or 'a piece has no place'}): refused")
            self.chunks |= chunks

    def _read_small(self, name: str) -> bytes:
        return manifests.read_checked(self.storage, self.folder, name, self.manifest)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self.metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        info = {id(item): self.metadata.storage_data[item.storage_index] for item in plan.items}
        for item in sorted(plan.items, key=lambda item: (info[id(item)].relative_path, info[id(item)].offset)):
            assert item.type == LoadItemType.TENSOR
            stored = self.read_chunk(item.storage_index)
            for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                stored = stored.narrow(dim, start, length)
            target = planner.resolve_tensor(item).detach()
            target.copy_(stored)
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def read_chunk(self, index: MetadataIndex) -> Tensor:
        """Return a stored part of a tensor, checked."""
        info = self.metadata.storage_data[index]
        name = f"{self.folder}/{info.relative_path}"
        where = f"{self.storage.url_of(name)} ({index.fqn})"
        ends = self.ends.get(info.relative_path, {})
        before, after = ends.get(info.offset), ends.get(info.offset + info.length)

        def is_right(data: bytes) -> bool:
            return before is not None and zlib.crc32(data, before) == after

        try:
            data = self.storage.read_exactly(name, info.offset, info.length, is_right, f"{where}: wrong checksum")
        except FileNotFoundError:
            raise DamagedCheckpoint(f"{where} is missing") from None
        try:
            tensor = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        except pickle.UnpicklingError:
            raise UnsafeCheckpoint(f"{where} is not a tensor: refused, nothing was run") from None
        except Exception as error:  # not damage: the checksum matches
            first_line = (str(error).splitlines() or [""])[0]
            raise RunError(f"{where}: {type(error).__name__}: {first_line}") from error
        if not isinstance(tensor, Tensor):
            raise UnsafeCheckpoint(f"{where} is not a tensor: refused")
        chunk = self.chunks[index]
        if tensor.shape != chunk:
            raise UnsafeCheckpoint(f"{where} has shape {[*tensor.shape]} and not {[*chunk]}: refused")
        return tensor
