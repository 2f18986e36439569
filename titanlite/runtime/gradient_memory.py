"""FSDP2 on a GPU: sharded gradients in the memory that activations leave in backward.

PyTorch's caching allocator has a pool of memory for each CUDA stream, and memory that is free in one pool does not
serve another. FSDP allocates reduced gradients on the stream of its reduce-scatters. So their pool grows in backward,
beside the pool of the compute stream, which has the room that activations left.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from titanlite.runtime.private_torch.fsdp import fsdp_param_group, keeps_reduced_gradients, reduce_scatter_of


def share_memory_of_gradients(units: Sequence[FSDPModule]) -> None:
    """Let FSDP units allocate their reduced gradients in the pool of the compute stream."""
    for unit in units:
        if group := fsdp_param_group(unit):
            unit.set_custom_reduce_scatter(_ReduceScatter(group))  # pyright: ignore[reportArgumentType]


class _ReduceScatter:
    """Reduce-scatter whose output belongs to the compute stream.

    Writing the output on another stream is safe: that stream has just waited for all that the compute stream has been
    given, so for the last use of the memory. Freeing it is safe after the compute stream has waited for the
    reduce-scatter, as it does before backward ends. Outputs that FSDP frees earlier stay in the pool of their stream.

    Args:
        group: FSDP's record of the unit.
    """

    def __init__(self, group: Any) -> None:
        self._group = group
        self._reduce_scatter = reduce_scatter_of(group)
        self._compute_stream: Any = None

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory for the input, which FSDP asks for on the compute stream, or then for the output."""
        streams = torch.get_device_module(device)
        stream = streams.current_stream()
        if stream != self._group.comm_ctx.reduce_scatter_stream:
            self._compute_stream = stream
        elif keeps_reduced_gradients(self._group, dtype):
            with streams.stream(self._compute_stream):
                return torch.empty(*size, dtype=dtype, device=device)
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._reduce_scatter(*args, **kwargs)
