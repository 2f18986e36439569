"""Context parallelism: several ranks compute one sequence (arXiv:2407.21783, section 3.3.2).

Each rank has two chunks of every sequence, see `SequencePart`. Keys and values of each layer are all-gathered, and
their gradients reduce-scattered; or attention exchanges tokens for heads (`HeadSplit`), as layers do that need whole
sequences. All else works on single tokens, so that it needs no change: the model computes as if the sequences were
short. Positions and documents come with the batch. Losses are summed over all ranks as ever.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from titanlite.batch import Batch
from titanlite.mesh import context_group, context_rank
from titanlite.models.base import Model
from titanlite.models.layers import LayerOfHeads
from titanlite.models.trial import takes_documents
from titanlite.ops.attention import (
    AttentionMask,
    Boundaries,
    ChunkBoundaries,
    ChunkMask,
    Scores,
    SequencePart,
    repeat_heads,
)
from titanlite.ops.kernels import Kernels, set_key_source
from titanlite.runtime.errors import UserError
from titanlite.runtime.private_torch.process_groups import all_gather, exchange_rows, reduce_scatter
from titanlite.techniques.expert.exchange import exchange

WHOLE = "documents", "boundaries"
"""Tensors of a batch that each rank needs of whole sequences."""


@dataclass(frozen=True)
class ContextSplit:
    """`SequenceSource` of sequences that the ranks of a process group split."""

    part: SequencePart
    group: dist.ProcessGroup

    def attend(
        self,
        kernels: Kernels,
        q_BNLH: Tensor,
        k_BKLH: Tensor,
        v_BKLH: Tensor,
        mask: AttentionMask | None,
        scores: Scores,
    ) -> Tensor:
        """Attend to keys and values of whole sequences, all-gathered in one collective, or to those of neighbouring
        chunks alone, where a window shows no more."""
        both_BJLH = torch.cat([k_BKLH, v_BKLH], dim=1)
        last = mask[-1] if isinstance(mask, tuple) else None
        if isinstance(last, ChunkMask | ChunkBoundaries) and last.begin:
            keys = self._with_neighbours(both_BJLH, last)
        else:
            keys = _Gather.apply(both_BJLH, self.group.size(), self.group.group_name)
        return attend_to(kernels, q_BNLH, keys, mask, scores)

    def by_heads(
        self,
        compute: Callable[[Sequence[Tensor], Sequence[Tensor]], Tensor],
        inputs: Sequence[Tensor],
        parameters: Sequence[Tensor],
    ) -> Tensor:
        """Compute whole sequences of this rank's part of the heads, between two all-to-alls (arXiv:2309.14509)."""
        ranks = self.part.ranks, self.group.group_name
        whole = _Swap.apply(torch.cat([*inputs], dim=-1), True, *ranks)
        own = [parameter.chunk(self.part.ranks)[self.part.rank] for parameter in parameters]
        out = compute(whole.split([tensor.shape[-1] for tensor in inputs], dim=-1), own)
        return _Swap.apply(out, False, *ranks)

    def _with_neighbours(self, both_BJLH: Tensor, mask: ChunkMask | ChunkBoundaries) -> list[Tensor]:
        """Return the keys and values that each chunk sees: the last ones of the chunk before, and its own.

        The chunk before the first one is of the rank before, that before the second one of the next rank. The last rank
        has both chunks in the middle, and nothing is before the first of rank 0.
        """
        rank, ranks = self.part.rank, self.part.ranks
        first, second = both_BJLH.chunk(2, dim=2)
        size = first.shape[2]
        seen = mask.end - mask.begin - size
        ends = {rank - 1: second[:, :, size - seen :], rank + 1: first[:, :, size - seen :]}  # by the rank they go to
        others = [other for other in ends if 0 <= other < ranks]
        rows = [int(other in others) for other in range(ranks)]
        received = exchange(torch.stack([ends[other] for other in others]), rows, rows, self.group.group_name).unbind()
        before = dict(zip(others, received, strict=True))
        return [
            torch.cat([before[rank - 1], first], dim=2) if rank else first,
            torch.cat([before.get(rank + 1, ends[rank + 1]), second], dim=2),
        ]


class HeadSplit(ContextSplit):
    """`SequenceSource` whose attention computes whole sequences of a part of the heads, too (Ulysses,
    arXiv:2309.14509)."""

    def attend(
        self,
        kernels: Kernels,
        q_BNLH: Tensor,
        k_BKLH: Tensor,
        v_BKLH: Tensor,
        mask: AttentionMask | None,
        scores: Scores,
    ) -> Tensor:
        """Exchange tokens of queries, keys and values for heads, attend, and exchange the result back.

        Each rank has as many key heads. Where there are fewer than ranks, or the ranks do not divide them, they are
        repeated first. Where a window shows neighbouring chunks only, their keys are less to send.
        """
        if isinstance(mask, tuple) and not isinstance(mask, Boundaries):  # of chunks
            return super().attend(kernels, q_BNLH, k_BKLH, v_BKLH, mask, scores)
        heads, head_dim = math.lcm(k_BKLH.shape[1], self.part.ranks), q_BNLH.shape[3]
        if q_BNLH.shape[1] % heads:
            raise UserError(
                f"parallelism.context_parallel_method: {self.part.ranks} processes do not divide "
                f"{q_BNLH.shape[1]} query heads: set ring"
            )
        if heads != k_BKLH.shape[1]:
            k_BKLH, v_BKLH = repeat_heads(k_BKLH, heads), repeat_heads(v_BKLH, heads)
        # The queries of each key head lie side by side, so that one all-to-all sends all three.
        q_BKLX = q_BNLH.unflatten(1, (heads, -1)).transpose(2, 3).flatten(3)

        def attend_whole(inputs: Sequence[Tensor], sinks: Sequence[Tensor]) -> Tensor:
            q_BYSX, k_BYSH, v_BYSH = inputs  # Y of the K key heads
            q_BMSH = q_BYSX.unflatten(3, (-1, head_dim)).transpose(2, 3).flatten(1, 2)
            own = scores._replace(sinks_N=sinks[0]) if sinks else scores
            return kernels.attend(q_BMSH, k_BYSH, v_BYSH, mask, scores=own)

        sinks = [] if scores.sinks_N is None else [scores.sinks_N]
        return self.by_heads(attend_whole, [q_BKLX, k_BKLH, v_BKLH], sinks)


def attend_to(
    kernels: Kernels, q_BNLH: Tensor, keys: Tensor | list[Tensor], mask: AttentionMask | None, scores: Scores
) -> Tensor:
    """Attend to keys and values of whole sequences [B, J, S, H], or to those that each chunk of the queries may see."""
    if (
        mask is None
        or isinstance(mask, Tensor | Boundaries)
        or (isinstance(keys, Tensor) and isinstance(mask[0], ChunkBoundaries))
    ):
        assert isinstance(keys, Tensor)
        k, v = keys.chunk(2, dim=1)
        return kernels.attend(q_BNLH, k, v, mask, scores=scores)
    outs = []
    for number, (q_BNCH, chunk_mask) in enumerate(zip(q_BNLH.chunk(len(mask), dim=2), mask, strict=True)):
        seen_BJZH = keys[:, :, chunk_mask.begin : chunk_mask.end] if isinstance(keys, Tensor) else keys[number]
        k, v = seen_BJZH.chunk(2, dim=1)
        own = (
            chunk_mask.mask
            if isinstance(chunk_mask, ChunkMask)
            else (chunk_mask._replace(begin=0, end=chunk_mask.end - chunk_mask.begin),)
        )
        outs.append(kernels.attend(q_BNCH, k, v, own, scores=scores))
    return torch.cat(outs, dim=2)


class _Swap(torch.autograd.Function):
    """Give all heads of these tokens [B, N, L, H] for whole sequences of a part of the heads [B, N / R, S, H], or back.
    Backward does the reverse."""

    @staticmethod
    def forward(ctx: Any, x_BNLH: Tensor, to_sequences: bool, size: int, name: str) -> Tensor:
        ctx.options = not to_sequences, size, name
        return _swap(x_BNLH, to_sequences, size, name)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return _swap(gradients[0], *ctx.options), None, None, None


def _swap(x_BNLH: Tensor, to_sequences: bool, size: int, name: str) -> Tensor:
    rows = [1] * size
    if to_sequences:
        return in_order(exchange_rows(x_BNLH.unflatten(1, (size, -1)).transpose(0, 1), rows, rows, name))
    return exchange_rows(by_rank(x_BNLH, size), rows, rows, name).transpose(0, 1).flatten(1, 2)


class _Gather(torch.autograd.Function):
    """All-gather sequences, and put their chunks in order. Backward reduce-scatters the gradients' sum.

    R is the number of ranks, C the tokens of a chunk. Later ranks have later first chunks, and earlier second ones.
    """

    @staticmethod
    def forward(ctx: Any, x_BJLH: Tensor, size: int, name: str) -> Tensor:
        ctx.group = size, name
        return in_order(all_gather(x_BJLH[None], size, name))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        size, name = ctx.group
        return reduce_scatter(by_rank(gradients[0], size), size, name)[0], None, None


def in_order(ranks_RBJLH: Tensor) -> Tensor:
    """Put the chunks of all ranks in the order of their tokens -> [B, J, S, H]."""
    size, B, J, L, H = ranks_RBJLH.shape
    chunks_BJRCH = ranks_RBJLH.new_empty(B, J, 2 * size, L // 2, H)
    first_RBJCH, second_RBJCH = ranks_RBJLH.chunk(2, dim=3)
    chunks_BJRCH[:, :, :size] = first_RBJCH.permute(1, 2, 0, 3, 4)
    chunks_BJRCH[:, :, size:] = second_RBJCH.flip(0).permute(1, 2, 0, 3, 4)
    return chunks_BJRCH.flatten(2, 3)


def by_rank(x_BJSH: Tensor, size: int) -> Tensor:
    """Undo `in_order` -> [R, B, J, L, H]."""
    chunks_RBJCH = x_BJSH.unflatten(2, (2 * size, -1)).permute(2, 0, 1, 3, 4)
    return torch.cat([chunks_RBJCH[:size], chunks_RBJCH[size:].flip(0)], dim=3)


def part_of(mesh: DeviceMesh, parts: int) -> SequencePart:
    """Return what this rank computes of sequences that are split into a multiple of the ranks of its context axis."""
    rank, ranks = context_rank(mesh)
    return SequencePart(rank * (parts // ranks), parts, parts // ranks)


def split_attention(model: nn.Module, mesh: DeviceMesh, *, exchanges_heads: bool = False) -> None:
    """Let the attention of a model gather keys and values of whole sequences, which ranks of the mesh split, or
    exchange tokens for heads."""
    group = context_group(mesh)
    assert group is not None, "the mesh has no context axis"
    part = part_of(mesh, group.size())._replace(exchanges_heads=exchanges_heads)
    set_key_source(model, (HeadSplit if exchanges_heads else ContextSplit)(part, group))


def split_batch(batch: Batch, part: SequencePart) -> Batch:
    """Return a part of each sequence of a batch, with positions and documents. The parts of several ranks are sequences
    of their own: those of the first rank, then those of the next."""
    size, seq_len = batch["tokens"].shape
    device = batch["tokens"].device
    places = part.indices(seq_len, device)
    if "documents" not in batch:  # each sequence is one
        batch = batch | {
            "positions": torch.arange(seq_len, device=device).expand(size, -1),
            "documents": torch.zeros(size, seq_len, dtype=torch.int32, device=device),
            "boundaries": torch.arange(0, (size + 1) * seq_len, seq_len, dtype=torch.int32, device=device),
        }
    own = {name: tensor.index_select(1, places) for name, tensor in batch.items() if name not in WHOLE}
    if part.computed > 1:
        own = {name: torch.cat(tensor.chunk(part.computed, dim=1)) for name, tensor in own.items()}
    return batch | own


def check_context(model: Model, *, degree: int = 2, tensor: int = 1, exchanges_heads: bool = False) -> None:
    """Check that several processes can split the sequences of a model on the meta device.

    Args:
        degree: number of them.
        tensor: processes that split its layers.
        exchanges_heads: attention exchanges tokens for heads.

    Raises:
        UserError: they cannot.
    """
    name = type(model).__name__
    if not takes_documents(model):
        raise UserError(
            f"needs a model whose forward takes `documents`, and {name}.forward does not: add the argument and take "
            "positions and the mask from it (docs/add_a_model.md), or set 1"
        )
    for number, block in enumerate(model.layers):
        if not any(hasattr(module, "key_source") for module in block.modules()):
            raise UserError(
                f"block {number} of {name} has no `key_source`, through which attention gets the keys of other "
                "processes: use titanlite.models.layers.Attention or see docs/add_a_model.md, or set 1"
            )
    for where, layer in model.named_modules():
        if not isinstance(layer, LayerOfHeads) or not (layer.computes_whole_sequences or exchanges_heads):
            continue
        for kind, number in layer.heads().items():
            if kind == "key/value" and not layer.computes_whole_sequences:
                continue  # attention repeats them
            if number % (degree * tensor):
                of_tensor = f" x tensor_parallel_degree {tensor}" if tensor > 1 else ""
                raise UserError(
                    f"{degree}{of_tensor} does not divide the {number} {kind} heads of {where}, which processes get in "
                    f"exchange for tokens: set {math.gcd(number // math.gcd(number, tensor), degree)}"
                )
