"""Experts on several ranks with the sums of one process that has all of them."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from titanlite.models.base import NOT_CHOSEN, ComputeExperts
from titanlite.ops.copies import Copies
from titanlite.ops.kernels import Kernels
from titanlite.runtime.recomputation import computed_once
from titanlite.techniques.expert.exchange import AllToAllExchange, OnTheWay
from titanlite.techniques.reproducible.sums import copies


class ExchangeOfMicroBatches(AllToAllExchange):
    """Computes the tokens of each rank, which are those of one micro-batch, apart: so kernels get the tokens of an
    expert that they would get on one process, padding among them. So a token is sent once for each of its experts, and
    its rank adds their outputs up. Gradients of weights are added over those ranks in the tree, whose lowest bits they
    are.

    Args:
        dtype: in which gradients are added over ranks, `training.mixed_precision_reduce`.
    """

    def __init__(self, group: dist.ProcessGroup, kernels: Kernels, *, dtype: torch.dtype) -> None:
        super().__init__(group, kernels)
        self.dtype = dtype

    def send(self, x_TD: Tensor, weights_TE: Tensor, active: int) -> OnTheWay:
        weights_RTX = self.exchange_weights(weights_TE)

        def find_places() -> tuple[list[int], list[int], Copies, list[Copies]]:
            is_chosen_TE, is_chosen_RTX = weights_TE != NOT_CHOSEN, weights_RTX != NOT_CHOSEN
            to_R = is_chosen_TE.sum(dim=0).unflatten(0, (len(weights_RTX), -1)).sum(dim=1)
            from_R = is_chosen_RTX.sum(dim=(1, 2))
            to_others, from_others, _ = self.kernels.read_counts(
                to_R, from_R, from_R.sum(), tokens=len(x_TD) * active, experts=weights_TE.shape[1], active=1
            )
            of_ranks = [Copies.of(*chosen) for chosen in zip(is_chosen_RTX, from_others, strict=True)]
            return to_others, from_others, Copies.of(is_chosen_TE, sum(to_others)), of_ranks

        to_others, from_others, sent, of_ranks = computed_once(find_places)
        return self.begin(sent.take(x_TD), weights_RTX, to_others, from_others, sent, of_ranks)

    def compute(self, sent: OnTheWay, stacks: Sequence[Tensor], compute: ComputeExperts) -> Tensor:
        own = zip(*(copies(stack, len(sent.from_others), self.dtype) for stack in stacks), strict=True)
        parts = zip(self.end(sent).split(sent.from_others), sent.copies, sent.weights, own, strict=True)
        out_SD = torch.cat([compute(x, own.values(weights), own.ends_N, stack) for x, own, weights, stack in parts])
        return self.back(out_SD, sent)
