"""Agreement of all ranks on the step after which a run stops."""

import torch
import torch.distributed as dist
from torch import Tensor

from titanlite.runtime.signals import StopRequests


class AgreedStop:
    """Flag of this rank that travels in the all-reduce of each step, and the sum of all ranks' flags.

    On GPUs the sum of a step is read one step later, when it has long been computed. So the host is at most one step
    ahead of the device, and the device never waits for the host.

    Args:
        device: device of the step's losses.
    """

    def __init__(self, requests: StopRequests, device: torch.device) -> None:
        self._requests = requests
        self._flag = torch.zeros(1, device=device)
        on_gpu = device.type == "cuda"
        self._on_host = [torch.zeros(1, pin_memory=True) for _ in range(2)] if on_gpu else []
        self._copied: torch.cuda.Event | None = None

    def flag(self) -> Tensor:
        """Return this rank's flag [1] for `train_step`: 1 if this process knows a reason to stop."""
        if self._requests.requested():
            self._flag.fill_(1)
        return self._flag

    def is_asked(self) -> bool:
        """Return whether any rank asks to stop now, in validation. Every rank calls it at the same time."""
        flag = torch.tensor(self._requests.requested())
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)  # on the CPU, and of one byte
        return bool(flag)

    def is_agreed(self, flags: Tensor) -> bool:
        """Return whether the run stops after this step, equal on all ranks. Every rank calls it after every step.

        Args:
            flags: sum over the ranks, `StepResult.stop_flags`.
        """
        self._requests.begin_training()
        if not self._on_host:
            return bool(flags > 0)
        if self._copied is not None and not self._copied.query():
            self._copied.synchronize()
        stops = self._copied is not None and float(self._on_host[0]) > 0
        self._on_host.reverse()
        self._on_host[0].copy_(flags, non_blocking=True)
        self._copied = torch.cuda.Event()
        self._copied.record()
        return stops
