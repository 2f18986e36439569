"""A checkpoint with the average of the weights in their place."""

import re
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import ReadItem

from titanlite.checkpoint.dcp_read import RankReader, ShardReader
from titanlite.checkpoint.state import AVERAGE
from titanlite.ops.mean import rounded_once, weighted_mean
from titanlite.runtime.errors import UserError


class AverageReader(RankReader):
    """Reader of the model in a checkpoint, with the values that validation has measured. What has no average (buffers,
    frozen parameters) is as it is.

    Args:
        where: the checkpoint, for errors.

    Raises:
        UserError: there is no average.
    """

    def __init__(self, stored: ShardReader, where: str) -> None:
        self.stored = stored
        entries: dict[str, Any] = stored.metadata.state_dict_metadata
        updates = next((index for index in stored.chunks if index.fqn == f"{AVERAGE}.updates"), None)
        if updates is None:
            raise UserError(f"--average: {where} has no average of the weights: it was trained without [average]")
        if not (taken := int(stored.read_chunk(updates))):
            raise UserError(f"--average: {where} has an average of no weights yet: take a later checkpoint")
        self._parts: dict[str, list[str]] = {}
        """Tensors whose mean is the average of a parameter: the EMA, or the snapshots in the order of their numbers."""
        for name in entries:
            match = re.fullmatch(rf"{AVERAGE}\.(?:ema|snapshot_(\d+))\.(.+)", name)
            if match and int(match[1] or 0) < taken:
                self._parts.setdefault(f"model.{match[2]}", []).append(name)
        for names in self._parts.values():
            names.sort(key=lambda name: (len(name), name))  # snapshot_10 after snapshot_9
        self.metadata = Metadata(
            {
                name: replace(entry, chunks=entries[self._parts[name][0]].chunks) if name in self._parts else entry
                for name, entry in entries.items()
                if name.startswith("model.")
            }
        )

    def read_item(self, item: ReadItem) -> Tensor:
        parts = self._parts.get(item.storage_index.fqn, [item.storage_index.fqn])
        read = [self.stored.read_item(replace(item, storage_index=replace(item.storage_index, fqn=it))) for it in parts]
        return read[0] if len(parts) == 1 else rounded_once(weighted_mean(read, [1.0] * len(read)), read[0].dtype)
