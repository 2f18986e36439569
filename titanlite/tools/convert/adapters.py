"""Adapters of `[lora]` in a checkpoint: merged into the weights of their layers, tensor by tensor.

A merged weight is W + (alpha / rank) B A, computed in float32 and rounded once. So every command that reads a
checkpoint sees a model without adapters that computes what the run does.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem

from titanlite.checkpoint.dcp_read import RankReader
from titanlite.checkpoint.resume import LORA_ALPHA
from titanlite.runtime.errors import UserError
from titanlite.techniques.lora.adapters import LORA_A, LORA_B
from titanlite.tools.convert.reader import read_whole


@dataclass(frozen=True, kw_only=True)
class Adapters:
    """Adapters of a checkpoint."""

    layers: tuple[str, ...]
    """Names of the layers that have one."""
    rank: int
    alpha: float
    reader: RankReader
    """Reader of the checkpoint, with adapters beside their weights."""

    def merged(self, layer: str) -> Tensor:
        """Return the merged weight of a layer, in float32."""
        weight, a, b = (read_whole(self.reader, f"{layer}.{part}").float() for part in ("weight", LORA_A, LORA_B))
        return weight.addmm_(b, a, alpha=self.alpha / self.rank)


def find_adapters(reader: RankReader, settings: Mapping[str, Any]) -> Adapters | None:
    """Return the adapters of a checkpoint; None if it has none.

    Args:
        settings: of its manifest.

    Raises:
        UserError: the base is quantized, as releases before 0.2 could train it.
    """
    ending = f".{LORA_A}"
    entries = {name: entry for name, entry in reader.metadata.state_dict_metadata.items() if name.startswith("model.")}
    shapes = {name: entry.size for name, entry in entries.items() if isinstance(entry, TensorStorageMetadata)}
    layers = [name.removesuffix(ending) for name in shapes if name.endswith(ending)]
    if not layers or LORA_ALPHA not in settings:
        return None
    if f"{layers[0]}.weight_scale" in entries:
        raise UserError("its base has 8 bits, which only titanlite 0.1 reads: export it there with --merge")
    return Adapters(
        layers=tuple(layer.removeprefix("model.") for layer in layers),
        rank=shapes[f"{layers[0]}{ending}"][0],
        alpha=float(settings[LORA_ALPHA]),
        reader=reader,
    )


class MergedReader(RankReader):
    """Reader of a checkpoint with adapters, as if it were of the merged model.

    A merged weight has the wider dtype of base and adapter. The others are as they are stored.
    """

    def __init__(self, adapters: Adapters) -> None:
        self.adapters = adapters
        self._layers = {f"model.{layer}.weight": layer for layer in adapters.layers}
        parts = {f"model.{layer}.{part}" for layer in adapters.layers for part in (LORA_A, LORA_B)}
        stored: dict[str, Any] = dict(adapters.reader.metadata.state_dict_metadata)
        entries = {name: entry for name, entry in stored.items() if name not in parts}
        for name, layer in self._layers.items():
            size, dtype = entries[name].size, stored[f"model.{layer}.{LORA_A}"].properties.dtype
            dtype = torch.promote_types(dtype, entries[name].properties.dtype)
            whole = ChunkStorageMetadata(torch.Size([0] * len(size)), size)
            entries[name] = TensorStorageMetadata(TensorProperties(dtype=dtype), size, [whole])
        self.metadata = Metadata(entries)

    def read_item(self, item: ReadItem) -> Tensor:
        layer = self._layers.get(item.storage_index.fqn)
        if layer is None:
            return self.adapters.reader.read_item(item)
        bounds = zip(item.storage_offsets, item.lengths, strict=True)
        return self.adapters.merged(layer)[tuple(slice(start, start + length) for start, length in bounds)]
