"""Distributions of initial values.

A value depends on random bits of its own and nothing else. So each rank computes the values of its shard alone, and
they are the same on every layout. Only operations whose result IEEE 754 defines to the last bit are used on the
device, so a GPU computes what a CPU computes.
"""

import math
from dataclasses import dataclass, field
from functools import cache
from statistics import NormalDist

import torch
from torch import Tensor

from titanlite.ops.hash_random import BITS

CELLS = 2**8
"""Pieces of each power of two in which `standard_normal` is linear. Its error is below 1e-6 standard deviations."""
_CELL_SHIFT = 53 - CELLS.bit_length()
"""Bits of a float64 below its exponent and the number of its cell."""
_FIRST_CELL = (1023 - BITS - 1) << (CELLS.bit_length() - 1)
"""Exponent and cell of `_SMALLEST`, as the upper bits of a float64 have them."""
_SMALLEST = 2.0 ** (-BITS - 1)
"""Smallest tail that random bits can name."""


class InitialValues:
    """Initial values of one parameter: a class of your own defines `values`."""

    def values(self, bits: Tensor, indices: Tensor) -> Tensor:
        """Return some values of the parameter.

        Args:
            bits: int64 [n], 48 random bits for each value.
            indices: int64 [n], where each value is in the whole parameter, in row-major order.

        Returns:
            float32 or float64 [n]. It must not depend on which other values are asked for.
        """
        raise NotImplementedError

    def scaled(self, factor: float) -> "InitialValues":
        """Return values that scale what the parameter does, for width and depth transfer."""
        return Scaled(self, factor)


@dataclass(frozen=True)
class Constant(InitialValues):
    """The same value everywhere."""

    value: float

    def __post_init__(self) -> None:
        _check_finite(value=self.value)

    def values(self, bits: Tensor, indices: Tensor) -> Tensor:
        return torch.full(bits.shape, self.value, dtype=torch.float64, device=bits.device)


@dataclass(frozen=True, kw_only=True)
class Uniform(InitialValues):
    """Uniform between two values."""

    low: float
    high: float

    def __post_init__(self) -> None:
        _check_finite(low=self.low, high=self.high)
        _check_order(self.low, self.high)

    def values(self, bits: Tensor, indices: Tensor) -> Tensor:
        return _fraction(bits).mul_(self.high - self.low).add_(self.low)


@dataclass(frozen=True)
class Normal(InitialValues):
    """Normal distribution: Normal(0.02) has that standard deviation."""

    std: float
    mean: float = field(default=0.0, kw_only=True)

    def __post_init__(self) -> None:
        _check_finite(std=self.std, mean=self.mean)
        if self.std < 0:
            raise ValueError(f"std must not be negative, got {self.std}")

    def values(self, bits: Tensor, indices: Tensor) -> Tensor:
        return standard_normal(_fraction(bits)).mul_(self.std).add_(self.mean)


@dataclass(frozen=True, kw_only=True)
class TruncatedNormal(InitialValues):
    """Normal distribution without the values outside of [low, high], as torch.nn.init.trunc_normal_ has it."""

    std: float
    low: float
    high: float
    mean: float = 0.0

    def __post_init__(self) -> None:
        _check_finite(std=self.std, low=self.low, high=self.high, mean=self.mean)
        _check_order(self.low, self.high)
        if self.std <= 0:
            raise ValueError(f"std must be positive, got {self.std}")
        first, last = self._range()
        if first == last:
            raise ValueError(f"[{self.low}, {self.high}] is too far from the mean {self.mean} for std {self.std}")

    def values(self, bits: Tensor, indices: Tensor) -> Tensor:
        first, last = self._range()
        fraction = _fraction(bits).mul_(last - first).add_(first).clamp_(_SMALLEST, 1 - _SMALLEST)
        values = standard_normal(fraction)
        return values.mul_(self.std).add_(self.mean).clamp_(self.low, self.high)

    def _range(self) -> tuple[float, float]:
        """Return the share of the distribution below `low`, and below `high`."""
        normal = NormalDist(self.mean, self.std)
        # Multiples of 2^-40 hide that the last bits of exp and erf differ between platforms.
        return round(normal.cdf(self.low) * 2**40) / 2**40, round(normal.cdf(self.high) * 2**40) / 2**40


@dataclass(frozen=True)
class Scaled(InitialValues):
    """Values of another distribution, times a factor."""

    base: InitialValues
    factor: float

    def values(self, bits: Tensor, indices: Tensor) -> Tensor:
        return self.base.values(bits, indices).mul_(self.factor)

    @property
    def std(self) -> float | None:
        """Standard deviation; None if the other distribution gives none."""
        std = getattr(self.base, "std", None)
        return None if std is None else std * self.factor


@dataclass(frozen=True)
class LessOne(InitialValues):
    """Values of a parameter to which the model adds 1: those of another distribution, less 1."""

    base: InitialValues

    def values(self, bits: Tensor, indices: Tensor) -> Tensor:
        return self.base.values(bits, indices).sub_(1)

    def scaled(self, factor: float) -> InitialValues:
        return LessOne(self.base.scaled(factor))


def _fraction(bits: Tensor) -> Tensor:
    """Return float64 between 0 and 1, both excluded. All of its bits are exact."""
    return bits.double().add_(0.5).mul_(2.0**-BITS)


def standard_normal(fraction: Tensor) -> Tensor:
    """Return the quantiles of the standard normal distribution, up to 1e-6.

    Logarithm, sine and erfinv have other last bits on other devices. So the quantiles come from a table, and between
    its entries they are linear. Each power of two of the smaller tail has `CELLS` entries.

    Args:
        fraction: float64, from 2^-49 to 1 - 2^-49.
    """
    slopes, starts = _cells(fraction.device)
    centered = fraction - 0.5
    tail = 0.5 - centered.abs()
    cell = (tail.view(torch.int64) >> _CELL_SHIFT).sub_(_FIRST_CELL)
    return torch.copysign(slopes[cell].mul_(tail).add_(starts[cell]), centered)


@cache
def _cells(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return slope and start of the absolute value of the quantile in each cell: float64 [48 * CELLS + 1]. The last
    cell is the middle of the distribution."""
    edges = [2.0**power * (1 + cell / CELLS) for power in range(-BITS - 1, -1) for cell in range(CELLS)]
    quantile = NormalDist().inv_cdf  # AS 241 (Wichura, 1988)
    # float32 hides that the last bits of log differ between platforms.
    heights = torch.tensor([-quantile(edge) for edge in edges] + [0.0]).double()
    places = torch.tensor([*edges, 0.5], dtype=torch.float64)
    slopes = heights.diff() / places.diff()
    starts = heights[:-1] - slopes * places[:-1]
    slopes, starts = (torch.cat((table, torch.zeros(1, dtype=torch.float64))) for table in (slopes, starts))
    return slopes.to(device), starts.to(device)


def free_tables() -> None:
    """Free the tables of all devices. They are made again when they are needed."""
    _cells.cache_clear()


def _check_finite(**values: float) -> None:
    for name, value in values.items():
        if not math.isfinite(value):
            raise ValueError(f"{name} must be a finite number, got {value}")


def _check_order(low: float, high: float) -> None:
    if low >= high:
        raise ValueError(f"low must be below high, got {low} and {high}")
