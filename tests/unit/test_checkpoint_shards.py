"""The ends of DCP: what is written is what torch.save writes, tensor by tensor."""

import io
import zlib
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType
from torch.utils.serialization import config as serialization

from titanlite.checkpoint.dcp_write import ShardWriter
from titanlite.storage.storage import open_storage

TENSORS = {
    "a scalar": torch.tensor(3.5),
    "another scalar": torch.tensor(-1.0),
    "a vector": torch.randn(1000),
    "the same shape": torch.zeros(1000),
    "a matrix": torch.randn(17, 31),
    "bfloat16": torch.randn(5, 7).bfloat16(),
    "integers": torch.arange(100),
    "Z, as the archive is padded": torch.full((300,), 0x5A, dtype=torch.uint8),
    "empty": torch.empty(0, 4),
    "not contiguous": torch.randn(6, 4).t(),
    "a part of a larger one": torch.randn(100)[10:20],
    "large": torch.randn(600, 600),
}


def test_shards_are_what_torch_save_writes(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path), owner="me")
    staging = storage.begin("step-00000001")
    items = [WriteItem(index=MetadataIndex(name), type=WriteItemType.TENSOR) for name in TENSORS]
    writer = ShardWriter(storage, staging, rank=3, read=lambda item: TENSORS[item.index.fqn])
    results = writer._write(items)
    data = (tmp_path / staging / "__3_0.distcp").read_bytes()
    written = writer.written["__3_0.distcp"]
    assert (written.size, written.crc32) == (len(data), zlib.crc32(data))
    for item, result, (end, crc32) in zip(items, results, written.ends, strict=True):
        info = result.storage_data
        part = data[info.offset : info.offset + info.length]
        assert part == torch_save(TENSORS[item.index.fqn]), item.index.fqn
        assert torch.equal(torch.load(io.BytesIO(part), weights_only=True), TENSORS[item.index.fqn])
        assert (end, crc32) == (info.offset + info.length, zlib.crc32(data[:end]))


def torch_save(tensor: Tensor) -> bytes:
    archive = io.BytesIO()
    is_part = tensor.untyped_storage().nbytes() != tensor.nbytes
    with serialization.patch("save.compute_crc32", False):  # pyright: ignore
        torch.save(tensor.clone() if is_part else tensor, archive)
    return archive.getvalue()
