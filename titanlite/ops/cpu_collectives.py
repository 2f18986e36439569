"""FSDP2 over gloo on CPUs. There are no streams, so overlap with compute has to be arranged here."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from titanlite.runtime.private_torch.tensors import call_after_backward, is_in_backward


class InFlight:
    """The one reduce-scatter that backward does not wait for. All of them end before backward ends.

    A pipeline reduces what it has added up between its backward passes. Such a reduce-scatter is waited for.
    """

    def __init__(self) -> None:
        self._finish: Callable[[], None] | None = None

    def start(self, finish: Callable[[], None]) -> None:
        """Register a reduce-scatter.

        Args:
            finish: called when the next reduce-scatter is about to start, or when backward ends; at once outside of it.
        """
        assert self._finish is None
        self._finish = finish
        if is_in_backward():
            call_after_backward(self.wait)
        else:
            self.wait()

    def wait(self) -> None:
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()


class AllToAllReduceScatter:
    """Reduce-scatter by an all-to-all. Gloo's own is an all-reduce, which sends twice the necessary bytes.

    Each rank sends every other rank its part, and averages the parts that it receives, in the order of ranks.

    Args:
        in_flight: where to leave a reduce-scatter that backward need not wait for. None: each ends within FSDP's call.
    """

    def __init__(self, in_flight: InFlight | None) -> None:
        self._in_flight = in_flight

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        assert op == dist.ReduceOp.AVG, op
        assert not async_op
        if self._in_flight:
            self._in_flight.wait()  # before its memory is reused
        parts = torch.empty_like(input_tensor)
        work = dist.all_to_all_single(parts, input_tensor, group=group, async_op=True)
        assert work is not None

        def finish() -> None:
            work.wait()
            torch.mean(parts.view(group.size(), -1), dim=0, out=output_tensor)

        if self._in_flight:
            self._in_flight.start(finish)
        else:
            finish()
