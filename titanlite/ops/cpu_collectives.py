"""FSDP2 over gloo on CPUs. There are no streams, so overlap with compute has to be arranged here."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from titanlite.runtime.gradient_memory import ReduceScatter
from titanlite.runtime.private_torch.fsdp import gather_asynchronously
from titanlite.runtime.private_torch.tensors import call_after_backward


def adapt_fsdp_to_gloo(
    units: Sequence[FSDPModule],
    *,
    shard_degree: int,
    keeps_gradients: bool,
    reduces_in_backward: bool,
    reduce_scatter: type[ReduceScatter] | None = None,
) -> None:
    """Give FSDP units collectives that suit gloo. See `Kernels.adapt_fsdp` for the arguments."""
    in_flight = InFlight()
    for index, unit in enumerate(units):
        if shard_degree == 1:  # without streams, the input can always be the output
            unit.set_custom_reduce_scatter(ReduceScatter(ranks=1, shares=True))  # pyright: ignore[reportArgumentType]
            continue
        late = in_flight if keeps_gradients and not reduces_in_backward else None
        comm = reduce_scatter(ranks=shard_degree, shares=False) if reduce_scatter else AllToAllReduceScatter(late)
        unit.set_custom_reduce_scatter(comm)  # pyright: ignore[reportArgumentType]
        if not reduces_in_backward:  # with replicas, an early all-gather takes 3 % more memory than the plan predicts
            gather_asynchronously(unit)
            unit.set_modules_to_forward_prefetch([*units[index + 1 : index + 2]])  # as FSDP does by itself on a GPU


class InFlight:
    """The one reduce-scatter that backward does not wait for. All of them end before backward ends."""

    def __init__(self) -> None:
        self._finish: Callable[[], None] | None = None

    def start(self, finish: Callable[[], None]) -> None:
        """Register a reduce-scatter. Call it within backward.

        Args:
            finish: called when the next reduce-scatter is about to start, or when backward ends.
        """
        assert self._finish is None
        self._finish = finish
        call_after_backward(self.wait)

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
