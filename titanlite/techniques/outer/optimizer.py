"""The outer optimizer of DiLoCo (arXiv:2311.08105): SGD with Nesterov momentum, one step for a round of steps.

Its gradient is the difference between the weights at the beginning and at the end of the round, and the next round
begins with its weights. One worker gains by it, too (arXiv:2503.09799, arXiv:2505.23725).

Each rank updates its own shards, element by element, with operations that are rounded one by one. So one worker
communicates nothing, and the weights have the same bits on every layout on which they have without it. Several workers
are replicas with weights of their own, and their round ends at the mean of these.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from titanlite.models.base import trainable_parameters
from titanlite.runtime.dtensor import own_part, unwrapped
from titanlite.runtime.private_torch.tensors import local_tensor
from titanlite.schema import Outer


class OuterOptimizer:
    """Outer weights and their momentum, of the trained parameters of a model: in float32, where the parameters are.

    Args:
        workers: axis of the ranks that hold the same shards for different workers. None: there is one worker.
    """

    def __init__(self, config: Outer, model: nn.Module, *, workers: DeviceMesh | None = None) -> None:
        self._config = config
        self._workers = workers
        self.worker = workers.get_local_rank() if workers else None
        """Number of this rank's worker, if there are several."""
        self._begun = torch.zeros((), dtype=torch.int64)
        self.tensors: dict[str, Tensor] = {"begun": self._begun}
        """State for checkpoints, by name. Because these are the tensors in use, a load writes into them."""
        self._parts: list[tuple[nn.Parameter, Tensor, Tensor]] = []
        """Each parameter, and this rank's part of its outer weight and of the momentum."""
        for name, parameter in trainable_parameters(model).items():
            outer, momentum = (torch.zeros_like(unwrapped(parameter), dtype=torch.float32) for _ in range(2))
            self.tensors |= {f"weights.{name}": outer, f"momentum.{name}": momentum}
            self._parts.append((parameter, local_tensor(outer), local_tensor(momentum)))

    @torch.no_grad()
    def begin(self) -> None:
        """Begin with the weights of the model, unless the state of a checkpoint is there."""
        if not self._begun:
            for parameter, outer, _ in self._parts:
                outer.copy_(own_part(parameter))
            self._begun.fill_(1)

    @torch.no_grad()
    def update(self, step: int, skip_reason: Tensor, finish_updates: Callable[[], None]) -> None:
        """Make a step if a round ends with this step, for which the host waits for the device.

        A skipped step changes no weights, so it ends no round: that lasts until the next multiple of its length.

        Args:
            skip_reason: 0 if the optimizer made its step. See `StepResult`.
            finish_updates: returns when the weights are those at the end of the step.
        """
        lr, decay = self._config.lr, self._config.momentum
        if step % self._config.every or int(skip_reason):
            return
        finish_updates()
        for parameter, outer, momentum in self._parts:
            weight = own_part(parameter)
            ended = self._mean_over_workers(weight) if self._workers else weight
            began = outer.to(weight.dtype)  # bfloat16 weights began where the outer weights were rounded to
            delta = began.float() - ended
            momentum.mul_(decay).add_(delta)
            # outer -= lr * (delta + decay * momentum), from where the round has ended: with lr 1 and without momentum,
            # float32 weights keep their bits.
            outer.sub_(began).add_(ended)
            outer.add_(delta.mul_(1 - lr)).sub_(momentum * (lr * decay))
            weight.copy_(outer)

    def _mean_over_workers(self, weight: Tensor) -> Tensor:
        """Return it in float32, where the weight is."""
        assert self._workers is not None
        mean = weight.to(self._workers.device_type, torch.float32, copy=True)
        dist.all_reduce(mean, group=self._workers.get_group())
        return mean.div_(self._workers.size()).to(weight.device)
