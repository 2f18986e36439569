"""Reading of unquantized weights into a model whose frozen weights are quantized, a few rows at a time."""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import ReadItem

from titanlite.models.quantized import LARGEST, quantize, scales_of
from titanlite.runtime.errors import UserError
from titanlite.runtime.private_torch.tensors import local_tensor


def to_quantize(wanted: Mapping[str, Tensor], there: Metadata, where: str) -> dict[str, Tensor]:
    """Return the scales for each weight that is quantized here and not there, by the weight's name.

    Raises:
        UserError: the format of a weight differs, other than by being quantized here only.
    """
    scales, stored = scales_of(wanted), there.state_dict_metadata
    for name in wanted.keys() & stored.keys():
        ours = wanted[name].dtype if name in scales else None
        theirs = stored[name].properties.dtype if f"{name}_scale" in stored else None  # pyright: ignore
        if theirs in LARGEST and theirs != ours:
            formats = f"is quantized as {theirs}, and this run's {'is not' if ours is None else f'as {ours}'}"
            raise UserError(f"lora.quantize_base: the base of {where} {formats}: give them the same format")
    return {name: wanted[scale] for name, scale in scales.items() if scale not in stored}


class QuantizingPlanner(DefaultLoadPlanner):
    """Load planner that lets some weights be read in float32, and writes their codes and scales.

    Args:
        scales: of each such weight, by its name in the state.
    """

    def __init__(self, scales: Mapping[str, Tensor]) -> None:
        super().__init__(allow_partial_load=False)
        self._scales = scales

    def transform_tensor(self, read_item: ReadItem, tensor: Tensor) -> Tensor:
        name = read_item.dest_index.fqn
        if name not in self._scales:
            return super().transform_tensor(read_item, tensor)
        if read_item.lengths[1] < tensor.shape[1]:
            raise UserError(f"{name} is stored in parts of rows, and rows are quantized as a whole")
        return torch.empty(read_item.lengths, dtype=torch.float32, device=tensor.device)

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        name = read_item.dest_index.fqn
        if name in self._scales:
            targets = self.lookup_tensor(read_item.dest_index), local_tensor(self._scales[name])
            for target, values in zip(targets, quantize(tensor, targets[0].dtype), strict=True):
                target.narrow(0, read_item.dest_offsets[0], len(values)).copy_(values)
