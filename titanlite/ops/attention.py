"""Causal attention, over whole sequences or within the documents of a packed sequence.

Shape suffixes: see `layers`.
"""

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from titanlite.batch import Batch


class SequencePart(NamedTuple):
    """The tokens of each sequence of S tokens that one rank, or several neighbouring ranks, compute.

    Rank r of R has the chunks r and 2R - 1 - r of the 2R chunks of a sequence. So all ranks have equal work under a
    causal mask, which lets late tokens see more (arXiv:2407.21783, section 3.3.2).
    """

    rank: int
    ranks: int
    computed: int = 1
    """Number of ranks, from `rank` on, whose tokens these are."""
    exchanges_heads: bool = False
    """Whether attention computes whole sequences of a part of the heads, unless a window makes keys of neighbouring
    chunks cheaper."""

    def chunks(self, seq_len: int) -> list[tuple[int, int]]:
        """Return the first token of both chunks of each rank, and the one behind the last."""
        size, own = seq_len // (2 * self.ranks), range(self.rank, self.rank + self.computed)
        numbers = [number for rank in own for number in (rank, 2 * self.ranks - 1 - rank)]
        return [(number * size, (number + 1) * size) for number in numbers]

    def indices(self, seq_len: int, device: torch.device) -> Tensor:
        """Return the places of these tokens in a sequence: int64 [computed * S / R]."""
        return torch.cat([torch.arange(*chunk, device=device) for chunk in self.chunks(seq_len)])

    def of_masks(self, seq_len: int, window: int | None) -> "SequencePart | None":
        """Return the tokens whose queries a mask is for. None: those of whole sequences."""
        sees_neighbours_only = first_key(*self.chunks(seq_len)[-1], window) > 0
        return self if sees_neighbours_only or not self.exchanges_heads else None


class Documents(NamedTuple):
    """Positions and boundaries of the documents of a batch. Each document is then processed as if it were alone.

    The type is a tuple of tensors, so that FSDP, activation checkpointing and the compiler find the tensors in a
    block's inputs. S is the length of whole sequences, of which a rank computes L tokens.
    """

    positions_BL: Tensor
    """Position of each token in its document, int64, from 0."""
    ids_BS: Tensor
    """Number of each token's document within its sequence, int32, ascending."""
    boundaries: Tensor
    """Start of each document among the B * S tokens, then B * S: int32 [documents + 1]. Sequences start one too."""


def document_arguments(batch: Batch) -> dict[str, Documents]:
    """Return the argument `documents` of the model's forward for a batch with documents, else nothing."""
    if "boundaries" not in batch:
        return {}
    return {"documents": Documents(batch["positions"], batch["documents"], batch["boundaries"])}


def of_whole_sequences(documents: Documents, part: SequencePart | None) -> Documents:
    """Return documents with the positions of all tokens of the sequences, in the place of those of a part."""
    if part is None:
        return documents
    ids_BS = documents.ids_BS
    is_first_BS = ids_BS.diff(prepend=ids_BS[:, :1] - 1) != 0
    places_S = torch.arange(ids_BS.shape[1], device=ids_BS.device)
    return documents._replace(positions_BL=places_S - (places_S * is_first_BS).cummax(dim=1).values)


class Boundaries(NamedTuple):
    """Boundaries of documents, for a kernel that takes documents packed: int32 [documents + 1]."""

    offsets: Tensor
    window: int | None = None
    """Tokens that a token sees, itself included. None: all before it."""


class ChunkBoundaries(NamedTuple):
    """Boundaries of documents for the queries of one chunk of each sequence, and for the keys that they may see.

    A document that ends before the chunk has no queries, one that begins behind it has neither.
    """

    begin: int
    """Place in the sequence of the first key."""
    end: int
    """Place in the sequence behind the chunk's last token."""
    queries: Tensor
    """int32 [documents + 1], among the B * C queries of chunks of C tokens."""
    keys: Tensor
    """int32 [documents + 1], among the B * (end - begin) keys."""
    window: int | None = None


class ChunkMask(NamedTuple):
    """Mask [B, 1, C, end - begin] of one chunk of queries and the keys that they may see. It is added to the scores."""

    begin: int
    end: int
    mask: Tensor


AttentionMask = Tensor | Boundaries | tuple[ChunkBoundaries, ...] | tuple[ChunkMask, ...]
"""Mask that keeps attention within documents, and within a window of tokens. A tensor [B, 1, L, S] is added to the
scores: 0, or -inf where the key is of another document, of a later token, or before the window. Kernels of packed
documents take their boundaries: of whole sequences, or of each chunk in its order."""


class Scores(NamedTuple):
    """How scores become weights."""

    scale: float | None = None
    """Factor of queries times keys. None: 1 / sqrt(H)."""
    sinks_N: Tensor | None = None
    """Score of each query head that takes part in the softmax and has no value, see `ops/sinks.py`. None: no sinks."""


PLAIN_SCORES = Scores()


def attend(
    q_BNLH: Tensor, k_BKLH: Tensor, v_BKLH: Tensor, mask: AttentionMask | None, scores: Scores = PLAIN_SCORES
) -> Tensor:
    """Causal attention -> [B, N, L, H]; with a mask, within documents only. Query heads can share key heads.

    Keys and values are of whole sequences, queries of this rank's part of them. Without a mask, the queries must be of
    whole sequences as well.
    """
    if isinstance(mask, Boundaries):
        return _packed_attention(q_BNLH, k_BKLH, v_BKLH, mask.offsets, mask.offsets, mask.window, scores)
    if isinstance(mask, tuple):
        chunks = tuple(chunk for chunk in mask if isinstance(chunk, ChunkBoundaries))
        assert len(chunks) == len(mask), "a key source attends to chunks with other masks"
        return _chunked_attention(q_BNLH, k_BKLH, v_BKLH, chunks, scores)
    assert scores.sinks_N is None, "PyTorch's attention knows no sinks"
    grouped = q_BNLH.shape[1] != k_BKLH.shape[1]
    return F.scaled_dot_product_attention(
        q_BNLH, k_BKLH, v_BKLH, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped, scale=scores.scale
    )


def seen_causally(window: int, seq_len: int) -> float:
    """Return how many tokens a token of a sequence sees on average under a causal mask, itself included, of at most
    `window`."""
    return window - window * (window - 1) / (2 * seq_len)


def repeat_heads(x_BKLH: Tensor, n_heads: int) -> Tensor:
    """Repeat each key or value head for its group of query heads -> [B, N, L, H]."""
    return x_BKLH.repeat_interleave(n_heads // x_BKLH.shape[1], dim=1)


def additive_mask(
    ids_BS: Tensor, dtype: torch.dtype, part: SequencePart | None = None, *, window: int | None = None
) -> Tensor:
    """Mask [B, 1, L, S] of a dtype: 0 within a document and -inf elsewhere.

    The mask has the dtype of the scores. A boolean mask would be converted, and kept for backward, once a block.

    Args:
        ids_BS: number of each token's document.
        part: tokens whose queries this process computes. None: all.
        window: tokens that a token sees, itself included. None: all before it.
    """
    places_S = torch.arange(ids_BS.shape[1], device=ids_BS.device)
    places_L = places_S if part is None else part.indices(len(places_S), ids_BS.device)
    distance_LS = places_L[:, None] - places_S
    seen_LS = distance_LS >= 0 if window is None else (distance_LS >= 0) & (distance_LS < window)
    ids_BL = ids_BS if part is None else ids_BS[:, places_L]
    seen_B1LS = (ids_BL[:, None, :, None] == ids_BS[:, None, None, :]) & seen_LS
    return torch.zeros(seen_B1LS.shape, dtype=dtype, device=ids_BS.device).masked_fill_(~seen_B1LS, -math.inf)


def chunk_masks(mask_B1LS: Tensor, part: SequencePart, window: int | None) -> tuple[ChunkMask, ...]:
    """Return the mask for each chunk of a part, of the keys that it may see."""
    chunks = part.chunks(mask_B1LS.shape[-1])
    masks = zip(mask_B1LS.chunk(len(chunks), dim=2), chunks, strict=True)
    begins = [(first_key(*chunk, window), chunk[1], mask) for mask, chunk in masks]
    return tuple(ChunkMask(begin, end, mask[..., begin:end].contiguous()) for begin, end, mask in begins)


def first_key(start: int, end: int, window: int | None) -> int:
    """Return the place of the first key that a chunk may see, if it sees no further than the chunk before; else 0."""
    return max(start - window + 1, 0) if window is not None and window <= end - start + 1 else 0


def chunk_boundaries(
    documents: Documents, part: SequencePart, *, window: int | None = None
) -> tuple[ChunkBoundaries, ...]:
    """Return the boundaries of documents for each chunk of a part."""
    seq_len = documents.ids_BS.shape[1]
    sequence, place = documents.boundaries // seq_len, documents.boundaries % seq_len
    return tuple(
        ChunkBoundaries(
            begin,
            end,
            sequence * (end - start) + (place - start).clamp(0, end - start),
            sequence * (end - begin) + (place - begin).clamp(0, end - begin),
            window,
        )
        for start, end in part.chunks(seq_len)
        for begin in [first_key(start, end, window)]
    )


def offsets_of(mask: Boundaries | tuple[ChunkBoundaries, ...]) -> list[Tensor]:
    """Return all offsets of a mask of packed documents."""
    return (
        [mask.offsets] if isinstance(mask, Boundaries) else [indices for c in mask for indices in (c.queries, c.keys)]
    )


def _chunked_attention(
    q_BNLH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor, chunks: tuple[ChunkBoundaries, ...], scores: Scores
) -> Tensor:
    """Causal attention of each chunk's queries to the keys before them -> [B, N, L, H]."""
    parts = [
        _packed_attention(
            q_BNCH,
            k_BKSH[:, :, chunk.begin : chunk.end],
            v_BKSH[:, :, chunk.begin : chunk.end],
            chunk.queries,
            chunk.keys,
            chunk.window,
            scores,
        )
        for q_BNCH, chunk in zip(q_BNLH.chunk(len(chunks), dim=2), chunks, strict=True)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


def _packed_attention(
    q_BNLH: Tensor,
    k_BKSH: Tensor,
    v_BKSH: Tensor,
    query_offsets: Tensor,
    key_offsets: Tensor,
    window: int | None,
    scores: Scores,
) -> Tensor:
    """Causal attention within documents -> [B, N, L, H]. Time grows with the documents' lengths; no mask is stored.

    The last query of a document is aligned with its last key.
    """
    from torch.nn.attention.varlen import varlen_attn  # the import takes a second, and not every device needs it

    q_TNH, k_TKH, v_TKH = (x.transpose(1, 2).flatten(0, 1) for x in (q_BNLH, k_BKSH, v_BKSH))
    B, _, L, _ = q_BNLH.shape
    # The longest document has at most L queries. Its true length is on the device, and reading it would wait.
    longest, sides = (L, k_BKSH.shape[2]), (-1 if window is None else window - 1, 0)
    operands, offsets = (q_TNH, k_TKH, v_TKH), (query_offsets, key_offsets)
    if scores.sinks_N is not None:
        from titanlite.ops.sinks import attend_packed  # most models have none

        out_TNH = attend_packed(*operands, scores.sinks_N, offsets, longest, sides=sides, scale=scores.scale)
    else:
        groups: dict[str, Any] = {"enable_gqa": True} if q_BNLH.shape[1] != k_BKSH.shape[1] else {}  # else torch 2.11
        out_TNH = varlen_attn(*operands, *offsets, *longest, scale=scores.scale, window_size=sides, **groups)
    assert isinstance(out_TNH, Tensor)
    return out_TNH.unflatten(0, (B, L)).transpose(1, 2)
