"""The optimizer step of a worker: one of several replicas, each of which trains weights of its own in a round."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from titanlite.loss import TokenLoss
from titanlite.mesh import group_of_replica, loss_group, ranks_of_stage
from titanlite.step import Step


class WorkerStep(Step):
    """Step of a replica whose gradients no other replica adds to. It minimizes the mean loss of its own tokens, and
    clips by its own norm.

    The losses of a result are means over the workers of their means, and the norm is the root of the mean square of
    theirs. All workers skip a step, or none.
    """

    def __post_init__(self, state: Mapping[str, Any]) -> None:
        super().__post_init__(state)
        self.group = loss_group(self.mesh, with_replicas=False)
        self.duplicates = ranks_of_stage(self.mesh) // self.group.size()  # so that sums are divided by workers, too
        self._workers = self.mesh["replicate"].size()
        self._worker_group = group_of_replica(self.mesh)

    def sum_over_ranks(
        self, losses: TokenLoss, square: Tensor, flags: Tensor, gradients: Sequence[Tensor]
    ) -> tuple[TokenLoss, Tensor, Tensor]:
        own = square.to(losses.total.device) * self._workers  # `replicas` counts those of the other workers
        dist.all_reduce(own, group=self._worker_group)
        self._own_norm = own.sqrt()
        return super().sum_over_ranks(losses, square, flags, gradients)

    def update(self, gradients: Sequence[Tensor], *, norm: Tensor, skip: Tensor) -> None:
        super().update(gradients, norm=self._own_norm, skip=skip)
