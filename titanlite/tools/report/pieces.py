"""Pieces of a checkpoint's tensors, for `titanlite inspect CHECKPOINT`: which file holds which elements.

Opening the checkpoint checks that each element of each tensor is in exactly one piece (`checkpoint/dcp_read.py`), and
that files are there with the manifest's sizes. This adds the bytes of pieces. `checkpoint verify` reads all bytes.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import torch
from rich.table import Column, Table
from torch.distributed.checkpoint.metadata import MetadataIndex

from titanlite.checkpoint.dcp_read import ShardReader
from titanlite.runtime.errors import UserError
from titanlite.tools.checkpoints.command import explaining_damage, find_newest
from titanlite.tools.plan.output import format_size
from titanlite.tools.report.blocks import format_numbers, join_blocks, split_block

FILES = 8
"""Files that the console shows."""
FILE = re.compile(r"__(\d+)_\d+\.distcp")


@dataclass(frozen=True)
class StoredPiece:
    """A part of a tensor in a file."""

    offsets: list[int]
    sizes: list[int]
    file: str
    rank: int | None
    """Rank that wrote the file; None if its name is not DCP's."""
    offset: int
    """First byte in the file."""
    bytes: int


@dataclass(frozen=True)
class StoredTensor:
    name: str
    shape: list[int]
    dtype: str
    pieces: list[StoredPiece]

    @property
    def bytes(self) -> int:
        """Bytes in all files, with the frames of torch.save."""
        return sum(piece.bytes for piece in self.pieces)


@dataclass(frozen=True)
class StoredCheckpoint:
    """Tensors of a checkpoint, each element in exactly one piece."""

    url: str
    step: int
    mesh: dict[str, int]
    files: dict[str, int]
    """Bytes of each file of tensors."""
    tensors: list[StoredTensor]


def read_pieces(path: str) -> StoredCheckpoint:
    """Read where a checkpoint's tensors are, and check it.

    Args:
        path: of a checkpoint; or of a run, whose newest checkpoint is read.

    Raises:
        UserError: there is none, or it is damaged: an element is in no piece or in several, a file is missing or has
            another size, or pieces lie in the same bytes.
    """
    with explaining_damage():
        storage, found, manifest = find_newest(path)
        reader = ShardReader(storage, found.folder, manifest)
    tensors = [_stored(reader, name) for name in reader.metadata.state_dict_metadata]
    _check_bytes(reader, tensors)
    names = {piece.file for tensor in tensors for piece in tensor.pieces}
    return StoredCheckpoint(
        url=reader.storage.url_of(reader.folder),
        step=reader.manifest.step,
        mesh=reader.manifest.mesh,
        files={name: record.size for name, record in reader.manifest.files.items() if name in names},
        tensors=tensors,
    )


def _stored(reader: ShardReader, name: str) -> StoredTensor:
    entry: Any = reader.metadata.state_dict_metadata[name]
    pieces = []
    for part in entry.chunks:
        place = reader.metadata.storage_data[MetadataIndex(name, part.offsets)]
        match = FILE.fullmatch(place.relative_path)
        rank = int(match[1]) if match else None
        pieces.append(
            StoredPiece([*part.offsets], [*part.sizes], place.relative_path, rank, place.offset, place.length)
        )
    return StoredTensor(name, [*entry.size], str(entry.properties.dtype).removeprefix("torch."), pieces)


def _check_bytes(reader: ShardReader, tensors: list[StoredTensor]) -> None:
    """Check the bytes of all pieces.

    Raises:
        UserError: two pieces lie in the same bytes, a piece has too few for its elements, or no checksum of its own.
    """
    by_file: dict[str, list[tuple[StoredPiece, StoredTensor]]] = {}
    for tensor in tensors:
        for piece in tensor.pieces:
            by_file.setdefault(piece.file, []).append((piece, tensor))
    for file, found in by_file.items():
        where = reader.storage.url_of(f"{reader.folder}/{file}")
        ends = reader.ends.get(file, {})
        for piece, tensor in found:
            if piece.bytes < math.prod(piece.sizes) * getattr(torch, tensor.dtype).itemsize:
                raise UserError(f"{where}: {tensor.name} has {piece.bytes} bytes for a piece of size {piece.sizes}")
            if not {piece.offset, piece.offset + piece.bytes} <= ends.keys():
                raise UserError(f"{where}: a piece of {tensor.name} has no checksum")
        found.sort(key=lambda it: (it[0].offset, it[0].bytes))
        for (piece, tensor), (following, other) in pairwise(found):
            if following.offset < piece.offset + piece.bytes:
                raise UserError(f"{where}: {tensor.name} and {other.name} lie in the same bytes")


def pieces_record(stored: StoredCheckpoint) -> dict[str, Any]:
    """Return a checkpoint's pieces as JSON values."""
    return asdict(stored)


def pieces_lines(stored: StoredCheckpoint, *, whole: bool) -> Iterator[str | Table]:
    """Yield what the console prints.

    Args:
        whole: show each tensor, where those of blocks that are alike would be one row.
    """
    mesh = " x ".join(f"{axis} {size}" for axis, size in stored.mesh.items())
    count = sum(len(tensor.pieces) for tensor in stored.tensors)
    yield stored.url
    yield f"step {stored.step}, saved on {mesh}: {len(stored.tensors):,} tensors in {count:,} pieces"
    numbers = [Column(name, justify="right", no_wrap=True) for name in ("pieces", "bytes")]
    table = Table("tensor", "shape", "dtype", *numbers, "of ranks", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for tensors in _alike(stored, whole=whole):
        first, files = tensors[0], {piece.file: piece.rank for tensor in tensors for piece in tensor.pieces}
        numbers_of_blocks = [parts[1] for tensor in tensors if (parts := split_block(tensor.name))]
        ranks = format_numbers(sorted({rank for rank in files.values() if rank is not None}))
        others = [name for name, rank in files.items() if rank is None]
        table.add_row(
            join_blocks(first.name, numbers_of_blocks) + (f", each of {len(tensors)}" if len(tensors) > 1 else ""),
            str(first.shape),
            first.dtype,
            f"{len(first.pieces):,}",
            format_size(first.bytes),
            ", ".join(filter(None, [ranks, *others])),
        )
    yield table
    held = Counter(piece.file for tensor in stored.tensors for piece in tensor.pieces)
    lines = [f"{file}: {format_size(size)}, {held[file]:,} pieces" for file, size in stored.files.items()]
    shown = len(lines) if whole else FILES
    yield from lines[:shown]
    if lines[shown:]:
        yield f"and {len(lines) - shown:,} more files"
    yield "Every element of every tensor is in exactly one piece, and every file has the size of the manifest."


def _alike(stored: StoredCheckpoint, *, whole: bool) -> list[list[StoredTensor]]:
    """Return the tensors, those of blocks together that differ in the ranks of their pieces at most."""
    groups: dict[Any, list[StoredTensor]] = {}
    for tensor in stored.tensors:
        parts = split_block(tensor.name)
        sizes = str([(piece.offsets, piece.sizes, piece.bytes) for piece in tensor.pieces])
        key = tensor.name if whole or parts is None else (parts[0], parts[2], tensor.dtype, *tensor.shape, sizes)
        groups.setdefault(key, []).append(tensor)
    return [*groups.values()]
