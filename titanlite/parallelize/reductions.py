"""How FSDP reduces gradients, by `FSDPModule.set_custom_reduce_scatter`.

On GPUs, reduced gradients are in the memory that activations leave in backward. PyTorch's caching allocator has a pool
of memory for each CUDA stream, and memory that is free in one pool does not serve another. FSDP allocates reduced
gradients on the stream of its reduce-scatters. So their pool grows in backward, beside the pool of the compute stream,
which has the room that activations left.

On CPUs, a reduce-scatter is an all-to-all, because gloo's own is an all-reduce, which sends twice the necessary bytes.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from titanlite.ops.kernels import in_every_pass
from titanlite.runtime.private_torch.fsdp import gather_asynchronously
from titanlite.runtime.private_torch.tensors import call_after_backward, is_in_backward

Reduce = Callable[[Tensor, Tensor, dist.ProcessGroup, Any], None]
"""(output, parts of all ranks, each of the output's size; group, operation): reduces on the current stream."""


def set_reductions(
    units: Sequence[FSDPModule],
    *,
    on_gpu: bool,
    shard_degree: int,
    keeps_gradients: bool,
    reduces_in_backward: bool,
    is_alone: bool,
    awaited: nn.Module | None,
    reduce: Reduce | None = None,
) -> None:
    """Choose how each FSDP unit reduces its gradients, before prefetch depths are set.

    Args:
        units: FSDP units in the order of the forward pass.
        keeps_gradients: see `keeps_reduced_gradients` of fsdp.py.
        reduces_in_backward: FSDP reads the output of a reduce-scatter before backward ends, to all-reduce or to
            convert it.
        is_alone: blocks communicate nothing themselves.
        awaited: unit whose reduce-scatter backward waits for, if any.
        reduce: adds gradients over shards. Default: they are averaged.
    """
    # Two collectives of one process group at a time have made gloo hang, where sequences were split.
    overlaps, in_flight = is_alone and not reduces_in_backward, InFlight()
    for index, unit in enumerate(units):
        if on_gpu:
            comm = ReduceScatter(ranks=shard_degree, shares=keeps_gradients, waits=unit is awaited, reduce=reduce)
        elif shard_degree == 1:  # without streams, the input can always be the output
            comm = ReduceScatter(ranks=1, shares=True)
        elif reduce:
            comm = ReduceScatter(ranks=shard_degree, shares=False, reduce=reduce)
        else:
            comm = AllToAllReduceScatter(in_flight if keeps_gradients and overlaps else None)
        unit.set_custom_reduce_scatter(comm)  # pyright: ignore[reportArgumentType]
        if overlaps and shard_degree > 1 and not on_gpu:  # with replicas, it takes 3 % more memory than planned
            gather_asynchronously(unit)
            following = [unit for unit in units[index + 1 :] if in_every_pass(unit)]
            unit.set_modules_to_forward_prefetch(following[:1])  # as FSDP does itself on a GPU


def reduce_scatter(output: Tensor, parts: Tensor, group: dist.ProcessGroup, op: Any) -> None:
    # Its name since torch 2.13; FSDP's own tensors are of one dimension, for which both are the same.
    collective = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
    collective(output, parts, op=op, group=group)


class ReduceScatter:
    """Reduce-scatter of one FSDP unit, for `FSDPModule.set_custom_reduce_scatter`.

    For each reduction, FSDP allocates the input on the compute stream and then the output on the stream that reduces.

    Args:
        ranks: number of ranks that the unit is sharded over. For one rank, FSDP copies the input to the output.
        shares: whether the output comes from the pool of the compute stream. It must last until after backward, where
            the compute stream has waited for the reduction: as a gradient that nothing converts, moves, adds or uses
            within backward. For one rank, the input is the output then.
        waits: whether the compute stream waits for the reduction, so that its input is free at once. FSDP keeps the
            input until the end of the next unit's backward pass, so that both overlap.
        reduce: the collective. Default: `reduce_scatter`.
    """

    def __init__(self, *, ranks: int, shares: bool, waits: bool = False, reduce: Reduce | None = None) -> None:
        self._ranks, self._shares, self._waits = ranks, shares, waits
        self._reduce = reduce or reduce_scatter
        self._compute_stream: Any = None
        self._input: Tensor | None = None
        """The input, from its allocation until that of the output."""

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory for the input, which FSDP asks for first, or then for the output."""
        streams = torch.get_device_module(device)
        stream = streams.current_stream()
        reduced, self._input = self._input, None
        # After a backward pass that raised in between, this can be a further input.
        is_input = reduced is None or stream == self._compute_stream or reduced.numel() != self._ranks * size[0]
        if is_input:
            self._compute_stream = stream
            self._input = torch.empty(*size, dtype=dtype, device=device)
            return self._input
        assert reduced is not None
        if not self._shares:
            return torch.empty(*size, dtype=dtype, device=device)
        if self._ranks == 1:
            return reduced
        with streams.stream(self._compute_stream):
            output = torch.empty(*size, dtype=dtype, device=device)
        # FSDP let this stream wait before. Since then, another thread may have used and freed the memory.
        stream.wait_stream(self._compute_stream)
        return output

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        assert not async_op
        self._reduce(output_tensor, input_tensor, group, op)
        if self._waits:
            self._compute_stream.wait_stream(torch.get_device_module(input_tensor.device).current_stream())
            input_tensor.untyped_storage().resize_(0)


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
