"""FSDP2 over gloo on CPUs. There are no streams, so overlap with compute has to be arranged here."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from titanlite.runtime.private_torch.autograd import call_after_backward, has_gradient_hooks
from titanlite.runtime.private_torch.fsdp import gather_asynchronously, observer_of, sharded_parameters


def adapt_fsdp_to_gloo(units: Sequence[FSDPModule], *, shard_degree: int, reduces_in_backward: bool) -> None:
    """Give FSDP units collectives that suit gloo. See `Kernels.adapt_fsdp` for the arguments."""
    in_flight = InFlight()
    for index, unit in enumerate(units):
        if shard_degree == 1:
            unit.set_custom_reduce_scatter(SharedBuffer())  # pyright: ignore[reportArgumentType]
            continue
        late = None if reduces_in_backward else in_flight
        unit.set_custom_reduce_scatter(AllToAllReduceScatter(unit, late))  # pyright: ignore[reportArgumentType]
        if not reduces_in_backward:  # with replicas, an early all-gather takes 3 % more memory than the plan predicts
            gather_asynchronously(unit)
            unit.set_modules_to_forward_prefetch([*units[index + 1 : -1][:1]])  # as FSDP does by itself on a GPU


class SharedBuffer:
    """Reduce-scatter for shard degree 1, where its output is its input.

    FSDP allocates the input and then the output of each unit. Both calls get one buffer, which saves a copy of all
    gradients. This is for CPUs only: a GPU allocates the two on different streams, and could reuse the buffer while the
    other stream still reads it.
    """

    def __init__(self) -> None:
        self._buffer: Tensor | None = None

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        if self._buffer is None:
            self._buffer = torch.empty(*size, dtype=dtype, device=device)
            return self._buffer
        buffer, self._buffer = self._buffer, None
        assert buffer.shape == torch.Size(size)
        return buffer

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        raise AssertionError("FSDP does not reduce-scatter over one process")


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
        unit: FSDP unit whose gradients are reduced.
        in_flight: where to leave a reduce-scatter that backward need not wait for. None: each ends within FSDP's call.
    """

    def __init__(self, unit: FSDPModule, in_flight: InFlight | None) -> None:
        self._unit = unit
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
            with observer_of(self._unit).waiting():
                work.wait()
            torch.mean(parts.view(group.size(), -1), dim=0, out=output_tensor)

        if self._in_flight and not self._is_read_in_backward():
            self._in_flight.start(finish)
        else:
            finish()

    def _is_read_in_backward(self) -> bool:
        """Return True if backward adds the output to earlier gradients, or an optimizer steps with it within
        backward."""
        parameters = sharded_parameters(self._unit)
        return any(it.grad is not None or has_gradient_hooks(it) for it in parameters)
