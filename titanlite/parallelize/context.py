"""Context parallelism: several ranks compute one sequence (arXiv:2407.21783, section 3.3.2).

Each rank has two chunks of every sequence, see `SequencePart`. Keys and values of each layer are all-gathered, and
their gradients reduce-scattered. All else works on single tokens, so that it needs no change: the model computes as if
the sequences were short. Positions and documents come with the batch. Losses are summed over all ranks as ever.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from titanlite.batch import Batch
from titanlite.kernels import Kernels
from titanlite.models.attention import SequencePart
from titanlite.parallelize.mesh import context_group, context_rank
from titanlite.runtime.private_torch.collectives import gather_with_gradient

WHOLE = "documents", "boundaries"
"""Tensors of a batch that each rank needs of whole sequences."""


@dataclass(frozen=True)
class ContextSplit:
    """`SplitSequences` over the ranks of a process group."""

    part: SequencePart
    group: dist.ProcessGroup

    def gather(self, k_BKLH: Tensor, v_BKLH: Tensor) -> tuple[Tensor, Tensor]:
        """All-gather keys and values in one collective, and put the chunks in their order."""
        both_BJLH = torch.cat([k_BKLH, v_BKLH], dim=1)
        ranks_RBJLH = gather_with_gradient(both_BJLH[None], self.group)
        k_BKSH, v_BKSH = join_parts(ranks_RBJLH.unbind(), dim=2).chunk(2, dim=1)
        return k_BKSH, v_BKSH


def split_attention(kernels: Kernels, mesh: DeviceMesh) -> Kernels:
    """Return kernels whose attention is of whole sequences, where ranks of the mesh split them."""
    group = context_group(mesh)
    if group is None:
        return kernels
    kernels = copy.copy(kernels)
    kernels.context = ContextSplit(SequencePart(*context_rank(mesh)), group)
    return kernels


def join_parts(parts: Sequence[Tensor], *, dim: int = 1) -> Tensor:
    """Return whole sequences of the parts of all ranks.

    Args:
        dim: of the tokens of a sequence.
    """
    first, second = zip(*(part.chunk(2, dim=dim) for part in parts), strict=True)
    return torch.cat([*first, *reversed(second)], dim=dim)


def split_batch(batch: Batch, mesh: DeviceMesh) -> Batch:
    """Return this rank's part of each sequence of a batch, with positions and documents."""
    part = SequencePart(*context_rank(mesh))
    if part.ranks == 1:
        return batch
    size, seq_len = batch["tokens"].shape
    device = batch["tokens"].device
    places = part.indices(seq_len, device)
    if "documents" not in batch:  # each sequence is one
        batch = batch | {
            "positions": torch.arange(seq_len, device=device).expand(size, -1),
            "documents": torch.zeros(size, seq_len, dtype=torch.int32, device=device),
            "boundaries": torch.arange(0, (size + 1) * seq_len, seq_len, dtype=torch.int32, device=device),
        }
    return {name: it if name in WHOLE else it.index_select(1, places) for name, it in batch.items()}
