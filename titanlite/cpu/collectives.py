"""FSDP2 on CPUs, where gloo sends: there are no streams, so what a GPU does beside computing has to be asked for."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Variable
from torch.distributed.fsdp import FSDPModule


def suit_gloo(units: Sequence[FSDPModule], *, shard_degree: int, reduces_at_once: bool) -> None:
    """Give units, in the order of the forward pass and the root last, communication that fits. To be called before
    depths of prefetching are set.

    Args:
        reduces_at_once: FSDP reads what a reduce-scatter gives before backward is over: to all-reduce it, or to convert
            it.
    """
    in_flight = InFlight()
    for index, unit in enumerate(units):
        if shard_degree == 1:
            unit.set_custom_reduce_scatter(NothingToScatter())  # pyright: ignore[reportArgumentType]
            continue
        late = None if reduces_at_once else in_flight
        unit.set_custom_reduce_scatter(ExchangeOfParts(unit, late))  # pyright: ignore[reportArgumentType]
        if not reduces_at_once:  # with replicas, gathering ahead takes 3 % of memory more than is planned
            unit._set_unshard_async_op(True)
            unit.set_modules_to_forward_prefetch([*units[index + 1 : -1][:1]])  # as a GPU does by itself


class NothingToScatter:
    """At shard degree 1 the reduce-scatter's output is its input, so FSDP is given one buffer for both, and what would
    be a copy of all gradients is none. FSDP allocates the input and then the output of each unit. On the CPU only: a
    GPU allocates the two on different streams, and one buffer could be given away while the other stream reads it."""

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
    """The one reduce-scatter that backward does not wait for. All are over when backward is."""

    def __init__(self) -> None:
        self._finish: Callable[[], None] | None = None

    def start(self, finish: Callable[[], None]) -> None:
        """Within backward. `finish` is called when the next one is about to start, or at the end."""
        assert self._finish is None
        self._finish = finish
        Variable._execution_engine.queue_callback(self.wait)

    def wait(self) -> None:
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()


class ExchangeOfParts:
    """Reduce-scatter for gloo, whose own is an all-reduce: it sends twice the bytes that it needs to. Here each rank
    sends every other its part, and averages what it gets, in the order of ranks.

    Args:
        unit: whose gradients they are.
        in_flight: None: every exchange is over when FSDP's call returns.
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
            self._in_flight.wait()  # before its memory is needed again
        parts = torch.empty_like(input_tensor)
        work = dist.all_to_all_single(parts, input_tensor, group=group, async_op=True)
        assert work is not None

        def finish() -> None:
            work.wait()
            torch.mean(parts.view(group.size(), -1), dim=0, out=output_tensor)

        if self._in_flight and not self._is_read_in_backward():
            self._in_flight.start(finish)
        else:
            finish()

    def _is_read_in_backward(self) -> bool:
        """By an addition to gradients of earlier micro-batches, or by an optimizer that steps in backward."""
        unit = self._unit._get_fsdp_state()._fsdp_param_group
        parameters: Any = [it.sharded_param for it in unit.fsdp_params] if unit else []
        return any(it.grad is not None or it._post_accumulate_grad_hooks for it in parameters)
