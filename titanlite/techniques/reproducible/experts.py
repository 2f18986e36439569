"""Experts on several ranks with the sums of one process that has all of them."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from titanlite.models.base import ComputeExperts
from titanlite.ops.kernels import Kernels
from titanlite.techniques.expert.exchange import AllToAllExchange
from titanlite.techniques.reproducible.sums import copies


class ExchangeOfMicroBatches(AllToAllExchange):
    """Computes the tokens of each rank, which are those of one micro-batch, apart: so kernels get the tokens of an
    expert that they would get on one process. Gradients of weights are added over those ranks in the tree, whose lowest
    bits they are.

    Args:
        dtype: in which gradients are added over ranks, `training.mixed_precision_reduce`.
    """

    def __init__(self, group: dist.ProcessGroup, kernels: Kernels, *, dtype: torch.dtype) -> None:
        super().__init__(group, kernels)
        self.dtype = dtype

    def compute_received(
        self,
        x_TD: Tensor,
        received_RX: Tensor,
        from_others: Sequence[int],
        weights: Sequence[Tensor],
        compute: ComputeExperts,
    ) -> Tensor:
        ends_RX = received_RX.cumsum(dim=1).to(torch.int32)
        of_ranks = zip(*(copies(it, len(from_others), self.dtype) for it in weights), strict=True)
        parts = zip(x_TD.split([*from_others]), ends_RX, of_ranks, strict=True)
        return torch.cat([compute(*part) for part in parts])
