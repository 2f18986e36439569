"""Each element of each tensor of a checkpoint is in exactly one piece, or the checkpoint is refused."""

import json
import pickle
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from tests.support.helpers import mentions
from tests.support.manifests import save
from titanlite.checkpoint.dcp_read import covers
from titanlite.checkpoint.manifest import folder_name
from titanlite.runtime.private_torch.checkpoint import StorageInfo
from titanlite.tools.cli import run

Ends = pytest.CaptureFixture[str]
Box = tuple[Sequence[int], Sequence[int]]
ROWS = [([0, 0], [4, 6]), ([4, 0], [3, 6])]
"""The rows of a tensor [7, 6] on two ranks."""
FRAME = 10
"""Bytes that a piece has beside its elements."""


def test_pieces_are_right_where_counting_each_element_says_so() -> None:
    draw, found = random.Random(0), Counter[bool]()
    for _ in range(400):
        shape = [draw.randint(0, 3) for _ in range(draw.randint(0, 3))]
        pieces = [([draw.randint(0, 2) for _ in shape], [draw.randint(0, 3) for _ in shape])
                  for _ in range(draw.randint(0, 3))]  # fmt: skip
        pieces += [([0] * len(shape), shape)] * draw.randint(0, 1)
        boxes = [[range(o, o + size) for o, size in zip(*piece, strict=True)] for piece in pieces]
        counts = Counter(index for box in boxes for index in product(*box))
        are_inside = all(o + size <= n for piece in pieces for o, size, n in zip(*piece, shape, strict=True))
        is_right = are_inside and counts == Counter(product(*map(range, shape)))
        assert covers(torch.Size(shape), chunks_of(pieces)) == is_right, (shape, pieces)
        found[is_right] += 1
    assert min(found.values()) > 40


def test_as_many_elements_as_there_are_and_one_twice() -> None:
    assert not covers(torch.Size([7, 6]), chunks_of([([0, 0], [4, 6]), ([3, 0], [3, 6])]))
    rows_apart = [([row, column], [1, 3]) for row in range(4) for column in (0, 3)]
    assert covers(torch.Size([4, 6]), chunks_of(rows_apart))
    assert not covers(torch.Size([4, 6]), chunks_of([*rows_apart[:-1], ([0, 3], [1, 3])]))


def chunks_of(boxes: Sequence[Box]) -> list[ChunkStorageMetadata]:
    return [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in boxes]


def stored(folder: Path, tensors: Mapping[str, tuple[Sequence[int], Sequence[Box]]]) -> None:
    """Write a checkpoint of float32 tensors, with their shapes and pieces. Piece N is in the file of rank N."""
    sizes: dict[str, int] = {}
    ends: dict[str, list[Any]] = {}
    storage: dict[MetadataIndex, Any] = {}
    entries: dict[str, Any] = {}
    for name, (shape, boxes) in tensors.items():
        chunks = chunks_of(boxes)
        entries[name] = TensorStorageMetadata(TensorProperties(torch.float32), torch.Size(shape), chunks)
        for rank, chunk in enumerate(chunks):
            file = f"__{rank}_0.distcp"
            length, offset = 4 * chunk.sizes.numel() + FRAME, sizes.get(file, 0)
            storage[MetadataIndex(name, chunk.offsets)] = StorageInfo(file, offset, length)
            sizes[file] = offset + length
            ends.setdefault(file, []).append([offset + length, "00000000"])
    metadata = Metadata(entries, storage_data=storage, storage_meta=StorageMeta())
    contents = {name: bytes(size) for name, size in sizes.items()}
    contents |= {".metadata": pickle.dumps(metadata), "checksums.json": json.dumps(ends).encode()}
    save(str(folder), 3, contents=contents)


BLOCKS: dict[str, Any] = {f"model.layers.{block}.w": ([7, 6], ROWS) for block in range(3)}


def test_damage_is_one_line(tmp_path: Path, capfd: Ends) -> None:
    stored(tmp_path, {"model.w": ([7, 6], ROWS[:1])})
    assert run(["checkpoint", "show", str(tmp_path)]) == 2
    out, error = capfd.readouterr()
    assert (out, len(error.splitlines())) == ("", 1)
    assert mentions(error, f"{tmp_path / folder_name(3)}/.metadata", "model.w", "[7, 6]")


def test_a_file_of_another_size_than_the_manifest_states(tmp_path: Path, capfd: Ends) -> None:
    stored(tmp_path, BLOCKS)
    file = tmp_path / folder_name(3) / "__1_0.distcp"
    file.write_bytes(file.read_bytes()[:-1])
    assert run(["checkpoint", "show", str(tmp_path)]) == 2
    out, error = capfd.readouterr()
    assert (out, len(error.splitlines())) == ("", 1)
    assert mentions(error, "__1_0.distcp", 245, 246)
