"""Sums whose bits do not depend on how a global batch is divided among ranks and micro-batches.

A sum of floating-point numbers depends on the order in which they are added. What a step computes for one micro-batch
does not depend on the layout, as long as its sequences are the same: training.local_batch_size neighbours in the global
batch. So sums over micro-batches have one order on every layout:

- Gradients are added in a binary tree over the number of the micro-batch in the global batch. The lowest bits of that
  number are the rank among those that shard parameters, then comes the number within the rank, then the replica.
  Gradients of one micro-batch are added over shards, then over micro-batches as a binary counter carries, and last over
  replicas.
- Losses and norms are added as integers, which is exact in any order.
"""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from titanlite.mesh import replica_group, world_group
from titanlite.step import Gradients

if TYPE_CHECKING:
    from titanlite.techniques.expert.exchange import DistributedExperts

BITS = 34
"""Bits of a summand as an integer, of those that the largest summand has. 2^28 of them can be added in an int64."""

ROWS = 1024
"""Rows of a gradient whose norms are computed together on GPUs."""


def tree_sum(parts: Tensor) -> Tensor:
    """Add over the first dimension, whose size is a power of two: neighbours first, then neighbours of their sums."""
    while len(parts) > 1:
        parts = parts[0::2] + parts[1::2]
    return parts[0]


def add_gradients_in_a_tree(
    model: nn.Module, mesh: DeviceMesh, *, micro_batches: int, experts: "DistributedExperts | None" = None
) -> None:
    """Let every FSDP unit of a model add gradients in the tree, in place. FSDP knows nothing of replicas then.

    The gradients of the global batch are added, not averaged over ranks.

    Args:
        micro_batches: in a step; a power of two.
        experts: those that are not on all ranks.
    """
    replicas = replica_group(mesh)
    for unit in model.modules():
        if isinstance(unit, FSDPModule):
            tree = GradientTree(micro_batches, replicas)
            unit.set_custom_reduce_scatter(tree)  # pyright: ignore[reportArgumentType]
            shards = experts.shard_degree if experts and unit in experts.layers else mesh["shard"].size()
            if shards == 1:
                unit.set_all_reduce_hook(tree.end_unsharded)


class GradientTree:
    """Reduce-scatter and what follows it for one FSDP unit, through FSDP2's public hooks. All of it is on the stream of
    reduce-scatters, on which FSDP then adds and frees the result.

    FSDP adds what it gets for each micro-batch to the gradients that it has. It gets -0.0, which changes no sum, until
    the last micro-batch of a step.

    Args:
        replicas: ranks that hold the same shard of the unit. None: there is one replica.
    """

    def __init__(self, micro_batches: int, replicas: dist.ProcessGroup | None) -> None:
        self._micro_batches = micro_batches
        self._replicas = replicas
        self._added = 0
        """Micro-batches of this step that have been added."""
        self._partial: list[Tensor] = []
        """Sums of 2^k micro-batches, for each bit k of `_added`, the largest first."""

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """Add over the ranks that shard the unit. FSDP does not call it for one rank."""
        parts = torch.empty_like(input_tensor)
        dist.all_to_all_single(parts, input_tensor, group=group)
        output_tensor.copy_(tree_sum(parts.view(group.size(), -1)))
        self.end_micro_batch(output_tensor)

    def end_unsharded(self, reduced: Tensor) -> None:
        """Do what `__call__` does where there is nothing to scatter. FSDP calls this hook on a stream of its own, but
        frees the gradients on that of reduce-scatters."""
        if reduced.device.type == "cuda":
            reduced.record_stream(torch.cuda.current_stream())
        self.end_micro_batch(reduced)

    def end_micro_batch(self, reduced: Tensor) -> None:
        """Add the gradients of one micro-batch to those before, and replace them with what FSDP is to add.

        Args:
            reduced: this rank's shard of the unit's gradients.
        """
        total = reduced
        bits = self._added
        while bits & 1:
            total = self._partial.pop() + total
            bits >>= 1
        self._added += 1
        if self._added < self._micro_batches:
            self._partial.append(total.clone() if total is reduced else total)
            reduced.fill_(-0.0)
            return
        self._added = 0
        assert not self._partial
        reduced.copy_(total if self._replicas is None else _add_over(total, self._replicas))


def _add_over(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Add a tensor of one dimension over ranks in the tree. Each rank adds a slice, so that it sends the bytes of a
    reduce-scatter and of an all-gather."""
    ranks = group.size()
    padded = nn.functional.pad(part, (0, -len(part) % ranks))
    parts = torch.empty_like(padded)
    dist.all_to_all_single(parts, padded, group=group)
    gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # its name since torch 2.13
    gather(padded, tree_sum(parts.view(ranks, -1)).contiguous(), group=group)
    return padded[: len(part)]


def partial_sums(micro_batches: int) -> int:
    """Return how many sums of micro-batches wait while the last of some micro-batches is computed."""
    return (micro_batches - 1).bit_count()


def exact_sums(parts: Sequence[Tensor], group: dist.ProcessGroup) -> list[Tensor]:
    """Add the elements of each part over all ranks -> float64 scalars, rounded to 2^-34 of the largest element.

    The result does not depend on which rank has which element, since elements are added as integers. It is infinite
    where an element is not finite.

    Args:
        parts: as many on each rank, of any lengths; on one device.
    """
    largest = torch.stack([part.abs().max() if part.numel() else part.new_zeros(()) for part in parts]).double()
    largest = largest.nan_to_num(nan=torch.inf, posinf=torch.inf)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    shift = BITS - torch.frexp(largest.nan_to_num(posinf=0.0)).exponent
    scaled = [torch.ldexp(part.double().nan_to_num(0.0, 0.0, 0.0), n) for part, n in zip(parts, shift, strict=True)]
    total = torch.stack([part.round().long().sum() for part in scaled])
    dist.all_reduce(total, group=group)
    return [*torch.where(largest.isfinite(), torch.ldexp(total.double(), -shift), torch.inf)]


class ExactSums(Gradients):
    """Gradients that `add_gradients_in_a_tree` adds, with a loss and a norm that do not depend on the layout."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self._replicas, self._world = mesh["replicate"].size(), world_group(mesh)

    def scale(self, valid_tokens: Tensor, *, ranks: int, micro_batches: int) -> Tensor:
        return 1 / valid_tokens

    def exact_sums(self, of_tokens: Sequence[Tensor], gradients: Sequence[Tensor]) -> list[Tensor]:
        *sums, square = exact_sums([*of_tokens, squares(gradients).to(of_tokens[0].device)], self._world)
        return [it.float() for it in (*sums, square / self._replicas)]


def squares(gradients: Iterable[Tensor]) -> Tensor:
    """Return the squared norm of each row of gradients, and the square of each element of those of one dimension,
    as float64 [N]. A row has the same bits whatever part of the gradient is here."""
    norms = [_row_norms(it) if it.dim() > 1 else it.abs() for it in gradients]
    return torch.cat([norm.flatten().double() for norm in norms]).square()


def _row_norms(gradient: Tensor) -> Tensor:
    """Return float32 norms over the last dimension."""
    rows = gradient.flatten(0, -2)
    norm = partial(torch.linalg.vector_norm, dim=-1, dtype=torch.float32)
    if gradient.device.type == "cpu":
        return norm(rows)
    # Kernels of GPUs choose the order of a row's sum by the number of rows, so that they get as many each time.
    padded = nn.functional.pad(rows, (0, 0, 0, -len(rows) % ROWS))
    return torch.cat([norm(some) for some in padded.split(ROWS)])[: len(rows)]
