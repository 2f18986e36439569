"""Reading by DCP: every tensor is checked in the pass that reads it, and no code from a checkpoint is run."""

import io
import json
import pathlib
import pickle
import zlib
from abc import abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.state_dict_loader import load  # pyright: ignore[reportUnknownVariableType]
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from titanlite.checkpoint import manifest as manifests
from titanlite.checkpoint.manifest import Manifest
from titanlite.runtime.errors import DamagedCheckpoint, RunError, UserError
from titanlite.runtime.private_torch.checkpoint import MemoryFormat, StorageInfo, StoredProperties
from titanlite.runtime.ranks import calling_dcp
from titanlite.storage.storage import Storage


class RankReader(StorageReader):
    """Base of the readers here: one is opened for one checkpoint, and each rank reads what its own plan asks for.

    Tensors that another program wrote are read under the names, and in the layout, of a model of ours.
    """

    where: str
    """Place, for errors."""
    metadata: Metadata
    """Our names and shapes of the tensors."""
    kept: Collection[str] = ()
    """Our tensors that another program's format does not know: they keep their initial values."""
    unknown: Mapping[str, str] = MappingProxyType({})
    """Description of each tensor that our model does not know, by the name in another program's format."""

    @abstractmethod
    def read_item(self, item: ReadItem) -> Tensor:
        """Return the region of a tensor that an item of a plan asks for."""

    def read_metadata(self, *args: object, **kwargs: object) -> Metadata:
        return self.metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            target = planner.resolve_tensor(item).detach()
            target.copy_(self.read_item(item))
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: object, **kwargs: object
    ) -> None: ...

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def reset(self, checkpoint_id: object = None) -> None: ...

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: object) -> bool:
        return True


def read_tensors(reader: StorageReader, tensors: dict[str, Tensor], group: dist.ProcessGroup | None) -> None:
    """Read tensors in place, every rank of a group its own part; without a group, in this process alone.

    Raises:
        DamagedCheckpoint, UserError, RunError: of `reader`; the same on every rank.
    """
    planner = DefaultLoadPlanner(allow_partial_load=False)
    with calling_dcp(group):
        load({**tensors}, storage_reader=reader, planner=planner, process_group=group, no_dist=group is None)


def covers(shape: torch.Size, pieces: Sequence[ChunkStorageMetadata]) -> bool:
    """Return whether each element of a tensor is in exactly one of its pieces.

    Along the dim with the most cuts, only neighbours are compared: a checkpoint of many ranks has millions of pieces.
    """
    for piece in pieces:
        if not len(piece.offsets) == len(piece.sizes) == len(shape):
            return False
        if any(min(o, n) < 0 or o + n > m for o, n, m in zip(piece.offsets, piece.sizes, shape, strict=True)):
            return False
    pieces = [piece for piece in pieces if piece.sizes.numel()]
    if sum(piece.sizes.numel() for piece in pieces) != shape.numel():
        return False
    dim = max(range(len(shape)), key=lambda dim: len({piece.offsets[dim] for piece in pieces}), default=0)
    active: list[ChunkStorageMetadata] = []
    for piece in sorted(pieces, key=lambda piece: piece.offsets[dim : dim + 1]):
        active = [other for other in active if other.offsets[dim] + other.sizes[dim] > piece.offsets[dim]]
        for other in active:
            boxes = zip(piece.offsets, piece.sizes, other.offsets, other.sizes, strict=True)
            if all(a < b + m and b < a + n for a, n, b, m in boxes):
                return False
        active.append(piece)
    return True


MOST_METADATA = 2**32
"""Bytes of metadata that are read at most: checkpoints of many ranks have millions of pieces."""


class Forbidden(pickle.UnpicklingError):
    """A pickle names something that is no part of DCP's metadata."""


class MetadataUnpickler(pickle.Unpickler):
    """Unpickler that knows the names of which DCP's metadata consists, and no other."""

    CLASSES = (
        metadata.Metadata,
        metadata.MetadataIndex,
        metadata.StorageMeta,
        metadata.TensorStorageMetadata,
        metadata.BytesStorageMetadata,
        metadata.ChunkStorageMetadata,
        MemoryFormat,
        StorageInfo,
    )

    def find_class(self, module_name: str, global_name: str) -> object:
        for known in self.CLASSES:
            if (module_name, global_name) == (known.__module__, known.__name__):
                return known
        match module_name, global_name:
            case metadata.TensorProperties.__module__, metadata.TensorProperties.__name__:
                return StoredProperties
            case "torch", "Size":
                return torch.Size
            case "torch", _ if isinstance(found := vars(torch).get(global_name), torch.dtype):
                return found
            case "torch.serialization", "_get_layout":
                return {str(layout): layout for layout in (torch.strided, torch.sparse_coo)}.__getitem__
            case "pathlib" | "pathlib._local", "PosixPath" | "WindowsPath" | "PurePosixPath" | "PureWindowsPath":
                return _path_of
            case _:
                raise Forbidden(f"{module_name}.{global_name}")


def _path_of(*parts: str) -> pathlib.PurePosixPath:
    return pathlib.PurePosixPath(*parts)


class UnsafeCheckpoint(UserError):
    """A checkpoint holds more than tensors, and loading it could run code. Nothing of it was run."""


def unpickle_metadata(data: bytes, where: str) -> Metadata:
    """Return DCP's metadata.

    Args:
        where: place of the file, for errors.

    Raises:
        UnsafeCheckpoint: it holds something else. Nothing was run.
    """
    try:
        found = MetadataUnpickler(io.BytesIO(data)).load()
    except Forbidden as error:
        message = f"{where} names {error}, which is no part of a checkpoint: refused, nothing was run"
        raise UnsafeCheckpoint(message) from None
    except Exception as error:  # an arbitrary pickle can fail in any way
        raise UnsafeCheckpoint(f"{where} is not the metadata of a checkpoint: refused ({error!r})") from None
    try:
        wrong = None if isinstance(found, Metadata) else type(found).__name__
        wrong = wrong or next(_of_other_types(found), None)
    except Exception as error:  # an object that was given no attributes, or others
        wrong = repr(error)
    if wrong is not None:
        raise UnsafeCheckpoint(f"{where} is not the metadata of a checkpoint: refused ({wrong})")
    return found


def _of_other_types(found: Metadata) -> Iterator[str]:
    """Yield the names of entries and places that are not of the types that DCP gives them."""

    def is_size(value: Any) -> bool:
        return issubclass(type(value), tuple) and all(type(number) is int and number >= 0 for number in value)

    entries: dict[Any, Any] = found.state_dict_metadata
    places: dict[Any, Any] = found.storage_data or {}
    for name, entry in entries.items():
        is_right = isinstance(name, str)
        if isinstance(entry, TensorStorageMetadata):
            is_right &= type(entry.properties.dtype) is torch.dtype and is_size(entry.size)
            is_right &= all(is_size(chunk.offsets + chunk.sizes) for chunk in entry.chunks)
        if not is_right or not isinstance(entry, TensorStorageMetadata | BytesStorageMetadata):
            yield str(name)
    for index, info in places.items():
        numbers = type(info.offset) is type(info.length) is int
        if not (isinstance(index.fqn, str) and isinstance(info.relative_path, str) and numbers):
            yield str(index)
        if not isinstance(info.transform_descriptors, Sequence | None) or not is_size(index.offset or ()):
            yield str(index)


def load_stored(data: bytes, shape: torch.Size, where: str) -> Tensor:
    """Return a tensor that DCP has stored.

    Args:
        where: file and name, for errors.

    Raises:
        UnsafeCheckpoint: it is something else, or has another shape. Nothing was run.
        RunError: it cannot be loaded.
    """
    try:
        tensor = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        raise UnsafeCheckpoint(f"{where} is not a tensor: refused, nothing was run") from None
    except Exception as error:  # not damage of ours: the checksum matches
        first_line = (str(error).splitlines() or [""])[0]
        raise RunError(f"{where}: {type(error).__name__}: {first_line}") from error
    if not isinstance(tensor, Tensor):
        raise UnsafeCheckpoint(f"{where} is not a tensor: refused")
    if tensor.shape != shape:
        raise UnsafeCheckpoint(f"{where} has shape {[*tensor.shape]} and not {[*shape]}: refused")
    return tensor


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
        self.where = storage.url_of(folder)
        where = storage.url_of(f"{folder}/{manifests.METADATA}")
        self.metadata = unpickle_metadata(self._read_small(manifests.METADATA), where)
        self._check_places(self.metadata, where)
        listed = self._read_small(manifests.CHECKSUMS)
        try:
            self.ends = {
                name: {0: 0, **{offset: int(crc, 16) for offset, crc in ends}}
                for name, ends in json.loads(listed).items()
            }
            """CRC-32 of each file up to the end of each tensor."""
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            where = self.storage.url_of(f"{self.folder}/{manifests.CHECKSUMS}")
            raise UnsafeCheckpoint(f"{where} has no checksums of a checkpoint: refused ({error})") from None

    def _check_places(self, found: Metadata, where: str) -> None:
        """Check that every entry is a whole tensor in a file of the manifest: DCP skips entries without a place."""
        places: dict[MetadataIndex, StorageInfo] = found.storage_data or {}
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
            if not chunks.keys() <= places.keys() or not covers(entry.size, entry.chunks):
                raise UnsafeCheckpoint(f"{where}: the pieces of {name} {[*entry.size]} are not all of it: refused")
            self.chunks |= chunks

    def _read_small(self, name: str) -> bytes:
        return manifests.read_checked(self.storage, self.folder, name, self.manifest)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        info = {id(item): self.metadata.storage_data[item.storage_index] for item in plan.items}
        items = sorted(plan.items, key=lambda item: (info[id(item)].relative_path, info[id(item)].offset))
        return super().read_data(replace(plan, items=items), planner)

    def read_item(self, item: ReadItem) -> Tensor:
        assert item.type == LoadItemType.TENSOR
        stored = self.read_chunk(item.storage_index)
        for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
            stored = stored.narrow(dim, start, length)
        return stored

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
        return load_stored(data, self.chunks[index], where)
