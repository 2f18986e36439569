"""DCP's StorageReader of foreign weights: each rank reads the regions of tensors that its own shards need.

The metadata has the names and shapes of our model. So `dcp.load` plans as for a checkpoint of our own, and the layout
of the other format is undone region by region.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.storage import StorageReader

from titanlite.checkpoint.dcp_read import RankReader, read_tensors
from titanlite.models.base import Model
from titanlite.models.formats import Formats, Place, Table
from titanlite.runtime.errors import DamagedCheckpoint, UserError
from titanlite.runtime.files import file_inside

Region = tuple[slice, ...]
"""Start and stop in each dim."""


class Part(NamedTuple):
    """Block of a foreign tensor that is stored in one piece."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    read: Callable[[Region], Tensor]
    """Return a region of the part."""


@dataclass(frozen=True)
class ForeignTensor:
    """Tensor of another format under its own name; its parts cover it."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: Sequence[Part]

    @staticmethod
    def in_one_part(
        name: str, shape: Sequence[int], dtype: torch.dtype, read: Callable[[Region], Tensor]
    ) -> "ForeignTensor":
        return ForeignTensor(name, tuple(shape), dtype, [Part((0,) * len(shape), tuple(shape), read)])

    def read(self, region: Region) -> Tensor:
        """Return a region, from all parts that have some of it."""
        whole = None
        for part in self.parts:
            common = [
                slice(max(wanted.start, start), min(wanted.stop, start + size))
                for wanted, start, size in zip(region, part.offsets, part.sizes, strict=True)
            ]
            if any(both.start >= both.stop for both in common):
                continue
            found = part.read(_moved(common, part.offsets))
            if tuple(common) == region:
                return found
            if whole is None:
                whole = torch.empty([wanted.stop - wanted.start for wanted in region], dtype=self.dtype)
            whole[_moved(common, [wanted.start for wanted in region])] = found
        assert whole is not None, f"no part of {self.name} has {region}"
        return whole


class ForeignSource(ABC):
    """Weights in another format."""

    where: str
    """Path, for errors."""
    folder: Path
    TOKENIZER = ""
    """Name of the file of the tokenizer in this format, if titanlite reads it."""

    @abstractmethod
    def table(self, formats: Formats) -> Table | None:
        """Return the names of this format in a model family; None if the family has none."""

    @abstractmethod
    def files(self) -> list[Path]:
        """Return the files that hold the weights and their description."""

    @abstractmethod
    def tensors(self, table: Table, shapes: Mapping[str, tuple[int, ...]]) -> list[ForeignTensor]:
        """Return all tensors, read when they are needed.

        Args:
            shapes: of the model's tensors in the layout and under the names of the format.

        Raises:
            UserError: something is missing or damaged, or holds more than tensors.
        """

    def family(self) -> str | None:
        """Return the model family; None if the source does not describe it, or if it is unknown."""
        return None

    def tokenizer(self) -> Path | None:
        """Return the file of the tokenizer beside the weights; None if there is none."""
        has_file = self.TOKENIZER and (self.folder / self.TOKENIZER).is_file()
        return file_inside(self.folder, self.TOKENIZER) if has_file else None

    def read_args(self, model_cls: type[Model]) -> dict[str, Any] | None:
        """Return the arguments of the model that the source describes; None if it does not describe any."""
        return None


def _moved(region: Iterable[slice], origin: Iterable[int]) -> Region:
    return tuple(slice(part.start - start, part.stop - start) for part, start in zip(region, origin, strict=True))


class _Stored(NamedTuple):
    """Chunk of our tensor: a foreign tensor, and the layout in which it has the chunk."""

    tensor: ForeignTensor
    place: Place


class ForeignReader(RankReader):
    """Reader of foreign weights under our names.

    Args:
        where: the source, for errors.
        tensors: all tensors of the source.
        table: names and layouts of the format.
        head_size: rows of an attention head, where the format interleaves them.
        model_names: names of the model's tensors.
    """

    def __init__(
        self,
        where: str,
        tensors: Iterable[ForeignTensor],
        table: Table,
        *,
        head_size: int | None,
        model_names: Iterable[str],
    ) -> None:
        self.where = where
        self.head_size = head_size
        self.bytes_read = 0
        self.unknown = unknown = dict[str, str]()
        self.kept = {f"model.{name}" for name in model_names if table.find(name) is None}
        self._stored: dict[MetadataIndex, _Stored] = {}
        found: dict[str, list[_Stored]] = {}
        for tensor in tensors:
            places = [*table.places(tensor.name)]
            if not places:
                unknown[tensor.name] = f"{tensor.name} {[*tensor.shape]}"
            for place in [place for place in places if not place.entry.is_copy]:
                found.setdefault(f"model.{place.name}", []).append(_Stored(tensor, place))
        entries = {name: self._entry(name, chunks) for name, chunks in found.items()}
        self.metadata = Metadata({name: entry for name, entry in entries.items() if entry is not None})

    def _entry(self, name: str, chunks: list[_Stored]) -> TensorStorageMetadata | None:
        """Return the metadata of our tensor; None if experts are missing between others, or differ in shape."""
        chunks = sorted(chunks, key=lambda chunk: chunk.place.expert or 0)
        shape = _our_shape(chunks[0])
        pieces = [(chunk.place.expert or 0, shape, chunk) for chunk in chunks]
        if chunks[0].place.expert is None:
            size, stored, pieces = shape, chunks[0].tensor, pieces[:1]
            if len(shape) == 3 and all(part.sizes[1:] == stored.shape[1:] for part in stored.parts):
                # Of a stack of experts, one part is in memory at a time.
                pieces = [
                    (part.offsets[0], (part.sizes[0], *shape[1:]), chunks[0]) for part in stored.parts if part.sizes[0]
                ]
        elif [chunk.place.expert for chunk in chunks] != [*range(len(chunks))] or any(
            _our_shape(chunk) != shape for chunk in chunks
        ):
            return None
        else:
            size = (len(chunks), *shape[1:])
        metadata = []
        for first, sizes, chunk in pieces:
            offsets = torch.Size([first, *[0] * (len(shape) - 1)][: len(shape)])
            metadata.append(ChunkStorageMetadata(offsets, torch.Size(sizes)))
            self._stored[MetadataIndex(name, offsets)] = chunk
        properties = TensorProperties(dtype=chunks[0].tensor.dtype)
        return TensorStorageMetadata(properties, torch.Size(size), metadata)

    def set_dtype(self, dtype: torch.dtype) -> None:
        """Give all tensors a dtype, except those that keep theirs."""
        for index, chunk in self._stored.items():
            if not chunk.place.entry.keeps_dtype:
                entry: Any = self.metadata.state_dict_metadata[index.fqn]
                entry.properties.dtype = dtype

    def drop(self, name: str) -> None:
        """Leave out a tensor."""
        if self.metadata.state_dict_metadata.pop(name, None) is not None:
            self._stored = {index: chunk for index, chunk in self._stored.items() if index.fqn != name}

    def rename(self, old: str, new: str) -> None:
        """Give a tensor another name."""
        entries = self.metadata.state_dict_metadata
        entries[new] = entries.pop(old)
        self._stored = {
            MetadataIndex(new, index.offset) if index.fqn == old else index: chunk
            for index, chunk in self._stored.items()
        }

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Return the shape of our tensor in the source; None if it is not there."""
        entry = self.metadata.state_dict_metadata.get(name)
        return tuple(entry.size) if isinstance(entry, TensorStorageMetadata) else None

    def first_rows(self, name: str, count: int) -> Tensor:
        """Return the first rows of one of our tensors that is no stack of experts."""
        entry = self.metadata.state_dict_metadata[name]
        assert isinstance(entry, TensorStorageMetadata)
        [chunk] = entry.chunks
        rest = [slice(0, size) for size in chunk.sizes[1:]]
        return self._read(MetadataIndex(name, chunk.offsets), [slice(0, count), *rest])

    def _read(self, index: MetadataIndex, region: Sequence[slice]) -> Tensor:
        """Return a region of a chunk in our layout."""
        tensor, (_, entry, expert) = self._stored[index]
        theirs = [*region] if expert is None else [*region[1:]]
        if expert is None and index.offset:
            theirs[:1] = [slice(index.offset[0] + region[0].start, index.offset[0] + region[0].stop)]
        if entry.transposed:
            theirs[-2:] = theirs[:-3:-1]
        if entry.column is not None:  # the two column sets are interleaved: read the span, then take every second
            theirs[-1] = slice(2 * theirs[-1].start + entry.column, 2 * theirs[-1].stop + entry.column - 1)
        rows = None
        if entry.interleaved:
            assert self.head_size is not None
            rows = interleaved_rows(theirs[0], self.head_size)
            first, last = int(rows.min()), int(rows.max())
            theirs[0], rows = slice(first, last + 1), rows - first
        found = tensor.read(tuple(theirs))
        self.bytes_read += found.nbytes
        found = found if rows is None else found[rows]
        found = found if entry.column is None else found[..., ::2]
        found = found.transpose(-2, -1) if entry.transposed else found
        return found if expert is None else found.unsqueeze(0)

    def read_item(self, item: ReadItem) -> Tensor:
        bounds = zip(item.storage_offsets, item.lengths, strict=True)
        return self._read(item.storage_index, [slice(start, start + length) for start, length in bounds])


def interleaved_rows(rows: slice, head_size: int) -> Tensor:
    """Return where the other format has these rows of ours. It pairs 2i and 2i + 1 in a head, and we i and i + H/2."""
    ours = torch.arange(rows.start, rows.stop)
    head, j = ours // head_size * head_size, ours % head_size
    return head + torch.where(j < head_size // 2, 2 * j, 2 * (j - head_size // 2) + 1)


def _our_shape(chunk: _Stored) -> tuple[int, ...]:
    """Return the shape of a foreign tensor in our layout."""
    shape = [*chunk.tensor.shape]
    if chunk.place.entry.column is not None and shape:
        shape[-1] //= 2
    if chunk.place.entry.transposed and len(shape) >= 2:
        shape[-2:] = shape[:-3:-1]
    return tuple(shape) if chunk.place.expert is None else (1, *shape)


def load_tensors(reader: StorageReader, tensors: dict[str, Tensor]) -> None:
    """Load tensors in place, by the model's names, in this process alone.

    Raises:
        UserError: one is damaged.
    """
    try:
        read_tensors(reader, {f"model.{name}": tensor for name, tensor in tensors.items()}, None)
    except DamagedCheckpoint as damage:
        raise UserError(str(damage)) from None


def read_whole(reader: StorageReader, name: str) -> Tensor:
    """Return a tensor by the model's name, on the CPU.

    Raises:
        KeyError: there is no such tensor.
        UserError: it is damaged.
    """
    entry: Any = reader.read_metadata().state_dict_metadata[f"model.{name}"]
    tensor = torch.empty(entry.size, dtype=entry.properties.dtype)
    load_tensors(reader, {name: tensor})
    return tensor
