"""Pieces of a checkpoint's tensors, for `titanlite inspect CHECKPOINT`: which file holds which elements.

Opening the checkpoint checks that each element of each tensor is in exactly one piece (`checkpoint/dcp_read.py`), and
that files are there with the manifest's sizes. This adds the bytes of pieces. `checkpoint verify` reads all bytes.
"""

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any

import torch
from rich.table import Column, Table
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

from titanlite.checkpoint.dcp_read import ShardReader
from titanlite.runtime.errors import UserError
from titanlite.tools.checkpoints.command import explaining_damage, find_newest
from titanlite.tools.plan.output import format_size
from titanlite.tools.report.blocks import format_numbers, join_blocks, split_block

FILES = 8
"""Files that the console shows."""
FILE = re.compile(r"__(\d+)_\d+\.distcp")


Record = dict[str, Any]


def read_pieces(path: str) -> Record:
    """Return the pieces of a checkpoint's tensors as JSON values, and check them.

    Args:
        path: of a checkpoint; or of a run, whose newest checkpoint is read.

    Raises:
        UserError: there is none, or it is damaged: an element is in no piece or in several, a file is missing or has
            another size, or pieces lie in the same bytes.
    """
    with explaining_damage():
        storage, found, manifest = find_newest(path)
        reader = ShardReader(storage, found.folder, manifest)
    tensors = [
        {
            "name": name,
            "shape": [*entry.size],
            "dtype": str(entry.properties.dtype).removeprefix("torch."),
            "pieces": [_piece(reader, name, part) for part in entry.chunks],
        }
        for name, entry in _entries(reader)
    ]
    _check_bytes(reader, tensors)
    used = {piece["file"] for tensor in tensors for piece in tensor["pieces"]}
    return {
        "url": storage.url_of(found.folder),
        "step": manifest.step,
        "mesh": manifest.mesh,
        "files": {name: record.size for name, record in manifest.files.items() if name in used},
        "tensors": tensors,
    }


def _entries(reader: ShardReader) -> Iterable[tuple[str, Any]]:
    return reader.metadata.state_dict_metadata.items()


def _piece(reader: ShardReader, name: str, part: ChunkStorageMetadata) -> Record:
    """Return a piece, with the rank that wrote its file: None if the name is not DCP's. The bytes have the frame of
    torch.save."""
    place = reader.metadata.storage_data[MetadataIndex(name, part.offsets)]
    match = FILE.fullmatch(place.relative_path)
    return {
        "offsets": [*part.offsets],
        "sizes": [*part.sizes],
        "file": place.relative_path,
        "rank": int(match[1]) if match else None,
        "offset": place.offset,
        "bytes": place.length,
    }


def _check_bytes(reader: ShardReader, tensors: list[Record]) -> None:
    """Check the bytes of all pieces.

    Raises:
        UserError: two pieces lie in the same bytes, a piece has too few for its elements, or no checksum of its own.
    """
    places = []
    for tensor, piece in ((it, piece) for it in tensors for piece in it["pieces"]):
        name, begin, size = tensor["name"], piece["offset"], piece["bytes"]
        where = reader.storage.url_of(f"{reader.folder}/{piece['file']}")
        if size < math.prod(piece["sizes"]) * getattr(torch, tensor["dtype"]).itemsize:
            raise UserError(f"{where}: {name} has {size} bytes for a piece of size {piece['sizes']}")
        if not {begin, begin + size} <= reader.ends.get(piece["file"], {}).keys():
            raise UserError(f"{where}: a piece of {name} has no checksum")
        places.append((where, begin, begin + size, name))
    for (where, _, end, name), (other_file, begin, _, other) in pairwise(sorted(places)):
        if where == other_file and begin < end:
            raise UserError(f"{where}: {name} and {other} lie in the same bytes")


def pieces_lines(stored: Record, *, whole: bool) -> Iterator[str | Table]:
    """Yield what the console prints.

    Args:
        stored: `read_pieces`.
        whole: show each tensor, where those of blocks that are alike would be one row.
    """
    mesh = " x ".join(f"{axis} {size}" for axis, size in stored["mesh"].items())
    held = Counter(piece["file"] for tensor in stored["tensors"] for piece in tensor["pieces"])
    yield stored["url"]
    yield f"step {stored['step']}, saved on {mesh}: {len(stored['tensors']):,} tensors in {held.total():,} pieces"
    numbers = [Column(name, justify="right", no_wrap=True) for name in ("pieces", "bytes")]
    table = Table("tensor", "shape", "dtype", *numbers, "of ranks", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for tensors in _alike(stored["tensors"], whole=whole):
        first, files = tensors[0], {piece["file"]: piece["rank"] for tensor in tensors for piece in tensor["pieces"]}
        numbers_of_blocks = [parts[1] for tensor in tensors if (parts := split_block(tensor["name"]))]
        ranks = format_numbers(sorted({rank for rank in files.values() if rank is not None}))
        others = [name for name, rank in files.items() if rank is None]
        table.add_row(
            join_blocks(first["name"], numbers_of_blocks) + (f", each of {len(tensors)}" if len(tensors) > 1 else ""),
            str(first["shape"]),
            first["dtype"],
            f"{len(first['pieces']):,}",
            format_size(sum(piece["bytes"] for piece in first["pieces"])),
            ", ".join(filter(None, [ranks, *others])),
        )
    yield table
    lines = [f"{file}: {format_size(size)}, {held[file]:,} pieces" for file, size in stored["files"].items()]
    shown = len(lines) if whole else FILES
    yield from lines[:shown]
    if lines[shown:]:
        yield f"and {len(lines) - shown:,} more files"
    yield "Every element of every tensor is in exactly one piece, and every file has the size of the manifest."


def _alike(tensors: list[Record], *, whole: bool) -> list[list[Record]]:
    """Return the tensors, those of blocks together that differ in the ranks of their pieces at most."""
    groups: dict[Any, list[Record]] = {}
    for tensor in tensors:
        parts = split_block(tensor["name"])
        sizes = str([(piece["offsets"], piece["sizes"], piece["bytes"]) for piece in tensor["pieces"]])
        own = (
            tensor["name"] if whole or parts is None else (parts[0], parts[2], tensor["dtype"], *tensor["shape"], sizes)
        )
        groups.setdefault(own, []).append(tensor)
    return [*groups.values()]
