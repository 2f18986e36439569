"""Rows of stored tensors, read in order with little memory: large tensors are never whole in memory."""

import io
import zipfile
import zlib
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex

from titanlite.checkpoint.dcp_read import ShardReader
from titanlite.runtime.errors import DamagedCheckpoint
from titanlite.tools.convert.source import Source, read_tensor

BLOCK = 1 << 24
"""Bytes to read at once."""


class RowReader:
    """Reader of tensors of a source, row by row (dim 0), each tensor from its first row to its last.

    Every byte of a checkpoint of ours is checked. The last row of a stored part raises if any byte of it has changed.

    Args:
        block: parts of a tensor of up to this many bytes are read at once.
    """

    def __init__(self, source: Source, *, block: int = BLOCK) -> None:
        self.source = source
        self.block = block
        self._reader = source.reader if isinstance(source.reader, ShardReader) else None
        self._name = ""
        self._whole: Tensor | None = None
        self._parts: dict[MetadataIndex, _Part] = {}

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Return rows of a tensor of the model.

        Raises:
            DamagedCheckpoint: the checkpoint has changed since it was written.
        """
        if name != self._name:
            self._name, self._whole, self._parts = name, None, {}
        if self._reader is None:
            if self._whole is None:
                self._whole = read_tensor(self.source, name)
            return self._whole[start:stop]
        entry: Any = self._reader.metadata.state_dict_metadata[f"model.{name}"]
        rows = torch.empty([stop - start, *entry.size[1:]], dtype=entry.properties.dtype)
        for chunk in entry.chunks:
            first, end = max(start, chunk.offsets[0]), min(stop, chunk.offsets[0] + chunk.sizes[0])
            if first >= end or not chunk.sizes.numel():
                continue
            index = MetadataIndex(f"model.{name}", chunk.offsets)
            if index not in self._parts:
                self._parts[index] = _Part(self._reader, index, rows.dtype, self.block)
            target = rows[first - start : end - start]
            for dim in range(1, rows.ndim):
                target = target.narrow(dim, chunk.offsets[dim], chunk.sizes[dim])
            target.copy_(self._parts[index].read(first - chunk.offsets[0], end - chunk.offsets[0]))
            if end == chunk.offsets[0] + chunk.sizes[0]:
                self._parts.pop(index).finish()
        return rows


class _Part:
    """Stored part of a tensor: an archive of torch.save, of which rows are read as bytes, in order."""

    def __init__(self, reader: ShardReader, index: MetadataIndex, dtype: torch.dtype, block: int) -> None:
        self.reader = reader
        self.index = index
        self.shape = reader.chunks[index]
        self.dtype = dtype
        info = reader.metadata.storage_data[index]
        self.name = f"{reader.folder}/{info.relative_path}"
        self.begin, self.length = info.offset, info.length
        self.row_bytes = self.shape[1:].numel() * dtype.itemsize
        ends = reader.ends.get(info.relative_path, {})
        self.crc_before, self.crc_after = ends.get(self.begin), ends.get(self.begin + self.length)
        self.data = self._find_data() if self.length > block and self.crc_before is not None else None
        self.whole = reader.read_chunk(index) if self.data is None else None
        self._restart()

    def read(self, start: int, stop: int) -> Tensor:
        if self.whole is not None:
            return self.whole[start:stop]
        assert self.data is not None
        first = self.data + start * self.row_bytes
        if first < self.position:
            self._restart()
        while self.position < first:
            self._next(min(BLOCK, first - self.position))
        data = self._next((stop - start) * self.row_bytes)
        return torch.frombuffer(bytearray(data), dtype=self.dtype).view(stop - start, *self.shape[1:])

    def finish(self) -> None:
        """Read what is left of the archive, and compare its checksum."""
        if self.whole is not None:
            return
        while self.position < self.length:
            self._next(min(BLOCK, self.length - self.position))
        if self.crc != self.crc_after:
            where = f"{self.reader.storage.url_of(self.name)} ({self.index.fqn})"
            raise DamagedCheckpoint(f"{where}: wrong checksum")

    def _restart(self) -> None:
        self.position = 0
        self.crc = self.crc_before or 0

    def _next(self, size: int) -> bytes:
        data = self.reader.storage.read(self.name, self.begin + self.position, size)
        self.crc = zlib.crc32(data, self.crc)
        self.position += len(data)
        if len(data) != size:
            raise DamagedCheckpoint(f"{self.reader.storage.url_of(self.name)} is too short")
        return data

    def _find_data(self) -> int | None:
        """Return where the tensor's bytes begin in the archive; None if they are not in the order of its rows."""
        try:
            layout = torch.load(cast(Any, _Window(self)), map_location="meta", weights_only=True)
            with zipfile.ZipFile(cast(Any, _Window(self))) as archive:
                [entry] = [it for it in archive.infolist() if it.filename.endswith("/data/0")]
            head = self.reader.storage.read(self.name, self.begin + entry.header_offset, 30)
        except Exception:  # an archive of another form, or damaged: reading it whole finds out
            return None
        sizes = layout.shape, layout.dtype, layout.storage_offset(), entry.file_size, entry.compress_type
        expected = self.shape, self.dtype, 0, self.shape.numel() * self.dtype.itemsize, zipfile.ZIP_STORED
        if sizes != expected or not layout.is_contiguous():
            return None
        return entry.header_offset + 30 + int.from_bytes(head[26:28], "little") + int.from_bytes(head[28:30], "little")


class _Window(io.RawIOBase):
    """The archive of a part as a file."""

    def __init__(self, part: _Part) -> None:
        self.part = part
        self.place = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.place

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self.place, io.SEEK_END: self.part.length}[whence]
        self.place = max(base + offset, 0)
        return self.place

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        size = min(len(view), max(self.part.length - self.place, 0))
        if size:
            part = self.part
            view[:size] = part.reader.storage.read(part.name, part.begin + self.place, size)
        self.place += size
        return size
