"""Weights for a model with another number of tokens than theirs."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from titanlite.checkpoint.dcp_read import RankReader

VOCABULARY = "model.args.vocab_size"


def resized(tensors: Mapping[str, Tensor], there: Metadata, vocab_size: int) -> dict[str, int]:
    """Return the stored rows of each tensor that has one for each token, where they are not as many as here."""
    found: dict[str, int] = {}
    for name, tensor in tensors.items():
        entry = there.state_dict_metadata.get(name)
        if tensor.ndim != 2 or not isinstance(entry, TensorStorageMetadata) or len(entry.size) != 2:
            continue
        rows, columns = entry.size
        if tensor.shape[0] == vocab_size != rows and tensor.shape[1] == columns:
            found[name] = rows
    return found


class ResizedReader(RankReader):
    """Reader of tensors with another number of rows than are stored.

    Rows that are stored are read. Further ones are the mean of all that are stored, computed in float64.
    """

    def __init__(self, reader: RankReader, rows: Mapping[str, int]) -> None:
        """
        Args:
            rows: number of rows for each tensor that is to have another one.
        """
        self.where, self.kept, self.unknown = reader.where, reader.kept, reader.unknown
        self._reader = reader
        self._means: dict[str, Tensor] = {}
        entries: dict[str, Any] = {**reader.metadata.state_dict_metadata}
        self._stored: dict[str, TensorStorageMetadata] = {name: entries[name] for name in rows}
        for name, count in rows.items():
            entries[name] = _with_rows(self._stored[name], count)
        self.metadata = Metadata(entries)

    def read_item(self, item: ReadItem) -> Tensor:
        index = item.storage_index
        stored = self._stored.get(index.fqn)
        if stored is None or index.offset is None or index.offset[0] < stored.size[0]:
            return self._reader.read_item(item)
        if index.fqn not in self._means:
            self._means[index.fqn] = self._mean(index.fqn, stored)
        return self._means[index.fqn].narrow(0, item.storage_offsets[1], item.lengths[1]).expand(item.lengths)

    def _mean(self, name: str, stored: TensorStorageMetadata) -> Tensor:
        """Return the mean of the stored rows, float64 [columns]."""
        total = torch.zeros(stored.size[1], dtype=torch.float64)
        for chunk in stored.chunks:
            index, zero = MetadataIndex(name, chunk.offsets), torch.Size([0, 0])
            part = self._reader.read_item(ReadItem(LoadItemType.TENSOR, index, zero, index, zero, chunk.sizes))
            total.narrow(0, chunk.offsets[1], chunk.sizes[1]).add_(part.sum(0, dtype=torch.float64))
        return total / stored.size[0]


def _with_rows(stored: TensorStorageMetadata, count: int) -> TensorStorageMetadata:
    """Return the description of a matrix that is cut, or that has a further chunk, so that it has as many rows."""
    rows, columns = stored.size
    chunks = [
        ChunkStorageMetadata(chunk.offsets, torch.Size([min(chunk.sizes[0], count - chunk.offsets[0]), chunk.sizes[1]]))
        for chunk in stored.chunks
        if chunk.offsets[0] < count
    ]
    if count > rows:
        chunks.append(ChunkStorageMetadata(torch.Size([rows, 0]), torch.Size([count - rows, columns])))
    return TensorStorageMetadata(stored.properties, torch.Size([count, columns]), chunks)
