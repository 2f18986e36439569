"""How FSDP reduces gradients, by `FSDPModule.set_custom_reduce_scatter`.

On GPUs, reduced gradients are in the memory that activations leave in backward. PyTorch's caching allocator has a pool
of memory for each CUDA stream, and memory that is free in one pool does not serve another. FSDP allocates reduced
gradients on the stream of its reduce-scatters. So their pool grows in backward, beside the pool of the compute stream,
which has the room that activations left.

On CPUs, a reduce-scatter is an all-to-all, because gloo's own is an all-reduce, which sends twice the necessary bytes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from titanlite.mesh import context_rank, data_parallel_rank, has_replicas, shard_degree_of
from titanlite.ops.kernels import Kernels, in_every_pass
from titanlite.runtime.private_torch.fsdp import gather_asynchronously
from titanlite.runtime.private_torch.tensors import call_after_backward, is_in_backward
from titanlite.schema import Config
from titanlite.step import reduces_once

GPUS_OF_A_NODE = 8
"""Largest shard group that is taken to be connected by NVLink."""
MANY_TOKENS = 2**14
"""Tokens of a micro-batch from which on blocks need more memory in backward than the loss."""
Reduce = Callable[[Tensor, Tensor, dist.ProcessGroup, Any], None]
"""(output, parts of all ranks, each of the output's size; group, operation): reduces on the current stream."""


@dataclass(frozen=True, kw_only=True)
class Reductions:
    """How the FSDP units of a model reduce their gradients."""

    on_gpu: bool
    keeps_gradients: bool
    """The output of a reduce-scatter becomes the gradients, and lasts until after backward."""
    overlaps: bool
    """On a CPU, a collective may run while another unit computes."""
    awaited: nn.Module | None
    """Unit whose reduce-scatter backward waits for, if any."""
    reduce: Reduce | None
    """Adds gradients over shards. Default: they are averaged."""

    @classmethod
    def of(
        cls,
        config: Config,
        mesh: DeviceMesh,
        kernels: Kernels,
        *,
        head: nn.Module | None,
        reduce_scatter: Reduce | None,
    ) -> "Reductions":
        """Return those of a config.

        Args:
            head: the head, if it is a unit of its own.
        """
        training, parallelism = config.training, config.parallelism
        degrees = parallelism.context_parallel_degree, parallelism.tensor_parallel_degree
        adds_over_replicas = has_replicas(mesh) and not config.outer.over_replicas  # after the reduce-scatter
        reduces_in_backward = adds_over_replicas or training.dtype != training.mixed_precision_reduce
        return cls(
            on_gpu=kernels.is_gpu(torch.device(mesh.device_type)),
            keeps_gradients=keeps_reduced_gradients(config, mesh),
            # Two collectives of one process group at a time have made gloo hang, where blocks communicate themselves,
            # or FSDP reads the output of a reduce-scatter before backward ends.
            overlaps=max(*degrees, parallelism.expert_parallel_degree) == 1 and not reduces_in_backward,
            awaited=head if waits_for_head(config, mesh) else None,
            reduce=reduce_scatter,
        )

    def apply(self, units: Sequence[FSDPModule], *, shard_degree: int) -> None:
        """Set them for FSDP units, in the order of the forward pass, before prefetch depths are set."""
        in_flight = InFlight()
        for index, unit in enumerate(units):
            if self.on_gpu:
                comm = ReduceScatter(
                    ranks=shard_degree, shares=self.keeps_gradients, waits=unit is self.awaited, reduce=self.reduce
                )
            elif shard_degree == 1:  # without streams, the input can always be the output
                comm = ReduceScatter(ranks=1, shares=True)
            elif self.reduce:
                comm = ReduceScatter(ranks=shard_degree, shares=False, reduce=self.reduce)
            else:
                comm = AllToAllReduceScatter(in_flight if self.keeps_gradients and self.overlaps else None)
            unit.set_custom_reduce_scatter(comm)  # pyright: ignore[reportArgumentType]
            if self.overlaps and shard_degree > 1 and not self.on_gpu:  # with replicas, 3 % more memory than planned
                gather_asynchronously(unit)
                following = [unit for unit in units[index + 1 :] if in_every_pass(unit)]
                unit.set_modules_to_forward_prefetch(following[:1])  # as FSDP does itself on a GPU


def waits_for_head(config: Config, mesh: DeviceMesh) -> bool:
    """Return True if backward stops until the gradients of the head are reduced.

    FSDP would keep its input beside the backward pass of the last block, which is the peak of memory: 2 GiB of Llama 3
    8B. It takes some 5 ms on the links within a node, which is little beside a step of many tokens.
    """
    training = config.training
    sequences = training.local_batch_size or training.global_batch_size // data_parallel_rank(mesh)[1]
    tokens = sequences * training.seq_len // context_rank(mesh)[1]
    return shard_degree_of(mesh) <= GPUS_OF_A_NODE and tokens >= MANY_TOKENS


def keeps_reduced_gradients(config: Config, mesh: DeviceMesh) -> bool:
    """Return True if the output of each reduce-scatter becomes the gradients of a unit, and lasts until after backward.

    Otherwise FSDP frees the output within backward: it converts it, copies it to the host, adds it to the gradients of
    another micro-batch, or lets an optimizer use it.
    """
    training = config.training
    at_once = data_parallel_rank(mesh)[1] * (training.local_batch_size or training.global_batch_size)
    is_added = (
        max(training.batch_sizes) > at_once
        and not config.debug.reproducible_layouts  # the step adds them
        and not reduces_once(config, mesh)
    )
    is_converted = training.dtype != training.mixed_precision_reduce
    return not (config.optimizer.in_backward or is_added or is_converted or training.enable_cpu_offload)


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
