"""FSDP2's reduce-scatter, with gradients in the memory that activations leave in backward.

PyTorch's caching allocator has a pool of memory for each CUDA stream, and memory that is free in one pool does not
serve another. FSDP allocates reduced gradients on the stream of its reduce-scatters. So their pool grows in backward,
beside the pool of the compute stream, which has the room that activations left.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule


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
    """

    def __init__(self, *, ranks: int, shares: bool, waits: bool = False) -> None:
        self._ranks, self._shares, self._waits = ranks, shares, waits
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
        self.reduce(output_tensor, input_tensor, group, op)
        if self._waits:
            self._compute_stream.wait_stream(torch.get_device_module(input_tensor.device).current_stream())
            input_tensor.untyped_storage().resize_(0)

    def reduce(self, output: Tensor, parts: Tensor, group: dist.ProcessGroup, op: Any) -> None:
        """Reduce the parts of all ranks on the current stream, each of the size of the output."""
        # Its name since torch 2.13; FSDP's own tensors are of one dimension, for which both are the same.
        reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
        reduce_scatter(output, parts, op=op, group=group)


def finish_reductions(model: Any) -> None:
    """Let the compute stream wait for all reductions of a backward pass that raised, before anything frees gradients.

    FSDP waits at the end of backward only. Gradients in the pool of the compute stream would be used again at once,
    while their reductions still write them. The model can then go on with another step.
    """
    if isinstance(model, FSDPModule) and hasattr(model, "reset_iter_state"):  # since torch 2.13
        model.reset_iter_state()
