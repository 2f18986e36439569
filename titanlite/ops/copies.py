"""Copies of rows, such as those of a token for each of its experts, and their sums.

The gradient of PyTorch's `index_select` adds rows up by atomics, which is slow on a GPU and has no fixed order. Here
rows are read back in a fixed order, added in float32 and rounded once.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Copies(NamedTuple):
    """Places of the S copies of T rows, of which each has up to N copies, one for a column. Copies are ordered by
    column and then by row. All tensors are int32.
    """

    cell_S: Tensor
    """The number n * T + t of each copy's column and row."""
    row_S: Tensor
    """The row of each copy."""
    place_S: Tensor
    """The copies of the first row, in the order of columns, then those of the second."""
    begin_T: Tensor
    """Where the copies of each row begin in `place_S`."""
    ends_N: Tensor
    """The copies of column n are from ends_N[n - 1] to ends_N[n]."""

    @classmethod
    def of(cls, is_copied_TN: Tensor, total: int) -> "Copies":
        """Return the places of copies of each row for the columns where it is True. The host does not wait.

        Args:
            total: number S of copies, which the host has to know.
        """
        return cls(*_places_of_copies(is_copied_TN, total))

    def take(self, x_TD: Tensor) -> Tensor:
        """Return the copies of rows -> [S, D]."""
        return _take(x_TD, *self[1:4])

    def add_up(self, x_SD: Tensor) -> Tensor:
        """Return the sum of the copies of each row -> [T, D]."""
        return _add_up(x_SD, *self[1:4])

    def values(self, x_TN: Tensor) -> Tensor:
        """Return the value for the row and the column of each copy -> [S]."""
        return x_TN.t().flatten().index_select(0, self.cell_S)


def places(flag_T: Tensor, total: int) -> Tensor:
    """Return the indices of the flags that are True -> [total], int32. The host does not wait."""
    return _places(flag_T.cumsum(dim=0, dtype=torch.int32), total)


def _places(so_far_T: Tensor, total: int) -> Tensor:
    number_S = torch.arange(1, total + 1, dtype=torch.int32, device=so_far_T.device)
    return torch.searchsorted(so_far_T, number_S, out_int32=True)


# These are custom operators, so that the compiler and the plan know their gradients. They save no tensor for backward:
# activation checkpointing recomputes up to the last saved tensor, and with one here it would repeat all matmuls.


@torch.library.custom_op("titanlite::places_of_copies", mutates_args=())
def _places_of_copies(is_copied_TN: Tensor, total: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    ones_TN = is_copied_TN.to(torch.int32)
    along_TN = ones_TN.flatten().cumsum(dim=0, dtype=torch.int32).view_as(ones_TN)
    along_NT = ones_TN.t().flatten().cumsum(dim=0, dtype=torch.int32).view_as(ones_TN.t())
    cell_S = _places(along_NT.flatten(), total)
    number_TN = along_NT.t().flatten()
    place_S = number_TN.index_select(0, _places(along_TN.flatten(), total)).sub_(1)
    ends_N = along_NT[:, -1:].sum(dim=1, dtype=torch.int32)  # a sum, because there may be no rows
    return cell_S, cell_S % len(ones_TN), place_S, along_TN[:, 0] - ones_TN[:, 0], ends_N


@_places_of_copies.register_fake
def _(is_copied_TN: Tensor, total: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    rows, columns = is_copied_TN.shape
    a, b, c, d, e = (is_copied_TN.new_empty(size, dtype=torch.int32) for size in (total, total, total, rows, columns))
    return a, b, c, d, e


@torch.library.custom_op("titanlite::take_copies", mutates_args=())
def _take(x_TD: Tensor, row_S: Tensor, place_S: Tensor, begin_T: Tensor) -> Tensor:
    return x_TD.index_select(0, row_S)


@torch.library.custom_op("titanlite::add_copies", mutates_args=())
def _add_up(x_SD: Tensor, row_S: Tensor, place_S: Tensor, begin_T: Tensor) -> Tensor:
    return F.embedding_bag(place_S, x_SD, begin_T, mode="sum")


@_take.register_fake
def _(x_TD: Tensor, row_S: Tensor, place_S: Tensor, begin_T: Tensor) -> Tensor:
    return x_TD.new_empty(len(row_S), x_TD.shape[1])


@_add_up.register_fake
def _(x_SD: Tensor, row_S: Tensor, place_S: Tensor, begin_T: Tensor) -> Tensor:
    return x_SD.new_empty(len(begin_T), x_SD.shape[1])


def _keep_places(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.places = inputs[1:]


def _gradient_of_take(ctx: Any, gradient_SD: Tensor) -> tuple[Tensor | None, ...]:
    return _add_up(gradient_SD.contiguous(), *ctx.places), None, None, None


def _gradient_of_sum(ctx: Any, gradient_TD: Tensor) -> tuple[Tensor | None, ...]:
    return _take(gradient_TD, *ctx.places), None, None, None


_take.register_autograd(_gradient_of_take, setup_context=_keep_places)
_add_up.register_autograd(_gradient_of_sum, setup_context=_keep_places)
