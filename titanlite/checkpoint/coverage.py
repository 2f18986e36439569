"""Check that the stored pieces of a tensor cover each of its elements exactly once."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple


class Piece(NamedTuple):
    """A box of a tensor's elements."""

    offsets: Sequence[int]
    """First index along each dim."""
    sizes: Sequence[int]


def find_fault(shape: Sequence[int], pieces: Sequence[Piece]) -> str | None:
    """Return the first fault in words: a gap, an overlap, or a piece outside the tensor. None: there is none.

    Pieces without elements are ignored. The time grows with the number of pieces, not with that of elements.

    Args:
        shape: of the whole tensor; () for a scalar.
    """
    if _are_rows(tuple(shape), pieces):
        return None
    for piece in pieces:
        is_box = len(piece.offsets) == len(piece.sizes) == len(shape)
        ends = [offset + size for offset, size in zip(piece.offsets, piece.sizes, strict=False)]
        if not is_box or min([0, *piece.offsets, *piece.sizes]) < 0 or any(map(int.__gt__, ends, shape)):
            return f"a piece at {[*piece.offsets]} of size {[*piece.sizes]} is not within {[*shape]}"
    return _fault(shape, [piece for piece in pieces if 0 not in piece.sizes], ())


def _are_rows(shape: tuple[int, ...], pieces: Sequence[Piece]) -> bool:
    """Return True if the pieces are runs of rows that follow each other to the end, as FSDP shards. The fast way: a
    checkpoint of many ranks has millions of pieces."""
    row, origin, end = shape[1:], (0,) * (len(shape) - 1), 0
    for offsets, sizes in sorted((tuple(offsets), tuple(sizes)) for offsets, sizes in pieces):
        if offsets[:1] != (end,) or offsets[1:] != origin or sizes[1:] != row or sizes[0] < 0:
            return False
        end += sizes[0]
    return bool(shape) and end == shape[0]


def _fault(shape: Sequence[int], pieces: Sequence[Piece], fixed: tuple[str, ...]) -> str | None:
    """Find a fault within a part of the tensor.

    Args:
        pieces: those that cover the part along the fixed dims.
        fixed: ranges of the part along the first dims, as [start:end] has them.
    """
    dim = len(fixed)
    if 0 in shape[dim:]:
        return None
    if dim == len(shape) or not pieces:
        if len(pieces) == 1:
            return None
        where = f"elements [{', '.join([*fixed, *':' * (len(shape) - dim)])}] are" if shape else "its value is"
        return f"{where} in {f'{len(pieces)} pieces' if pieces else 'no piece'}"
    slabs = _slabs(shape[dim], pieces, dim)
    return next(filter(None, (_fault(shape, within, (*fixed, f"{a}:{b}")) for a, b, within in slabs)), None)


def _slabs(size: int, pieces: Sequence[Piece], dim: int) -> Iterator[tuple[int, int, list[Piece]]]:
    """Cut one dim wherever a piece begins or ends. Yield (start, end, pieces that cover the slab)."""
    bounds = sorted({0, size, *(it.offsets[dim] for it in pieces), *(it.offsets[dim] + it.sizes[dim] for it in pieces)})
    waiting = sorted(pieces, key=lambda it: it.offsets[dim], reverse=True)
    active: list[Piece] = []
    for start, end in pairwise(bounds):
        active = [it for it in active if it.offsets[dim] + it.sizes[dim] > start]
        while waiting and waiting[-1].offsets[dim] == start:
            active.append(waiting.pop())
        yield start, end, active
