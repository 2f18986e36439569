"""The law of the losses of several sizes: loss = E + A / N^alpha."""

import math
from collections.abc import Sequence
from statistics import mean
from typing import NamedTuple

import numpy as np


class Estimate(NamedTuple):
    """A value with its 95 % interval, which is None without spare runs."""

    value: float | None = None
    low: float | None = None
    high: float | None = None


class Law:
    """loss = E + A / N^alpha, by least squares of relative differences (the form of arXiv:2203.15556).

    For a given alpha, the law is a straight line in N^-alpha. So alpha is searched on a grid, and E and A of each are
    exact. E is at least 0. An interval has all values for which the least sum of squares grows by at most t^2 times the
    variance of the runs, with Student's t for the runs beyond the three that the law needs. With three runs there is
    none. That the law holds beyond the runs is assumed.

    Args:
        sizes: N of each run.
        losses: of each run.
    """

    def __init__(self, sizes: Sequence[float], losses: Sequence[float]) -> None:
        self.scale = math.exp(mean(map(math.log, sizes)))
        self.sizes, self.losses = np.array(sizes) / self.scale, np.array(losses)
        self.alphas = np.geomspace(0.01, 4, 1500)
        self._solve()
        near = self.alphas[max(0, self.best - 1)], self.alphas[min(self.best + 1, self.alphas.size - 1)]
        self.alphas = np.unique([*self.alphas, *np.geomspace(*near, 1501)])
        self._solve()
        self.spare = len(self.losses) - 3
        most = self.squares[self.best] * (1 + student_t(self.spare) ** 2 / self.spare) if self.spare else 0.0
        self._room = most - self.squares

    def _solve(self) -> None:
        """Find E and A of each alpha."""
        weights, y = 1 / self.losses**2, self.losses
        x = self.sizes ** -self.alphas[:, None]  # [alphas, runs]
        total, self._mean = weights.sum(), (x @ weights) / weights.sum()
        centered = x - self._mean[:, None]
        self._spread = (centered**2) @ weights
        slope = (centered @ (weights * y)) / self._spread
        floor = (weights @ y) / total - slope * self._mean
        self._bounded = floor < 0
        self._power = (x**2) @ weights
        self.slope = np.where(self._bounded, (x @ (weights * y)) / self._power, slope)
        self.floor = np.where(self._bounded, 0.0, floor)
        self._total = total
        self.squares = ((y - self.floor[:, None] - self.slope[:, None] * x) ** 2) @ weights
        self.best = int(self.squares.argmin())

    @property
    def alpha(self) -> Estimate:
        inside = self.alphas[self._room >= 0]
        return Estimate(self.alphas[self.best], *((inside.min(), inside.max()) if self.spare else (None, None)))

    @property
    def amplitude(self) -> float:
        """A, for N in parameters."""
        return self.slope[self.best] * self.scale ** self.alphas[self.best]

    def predict(self, size: float, *, of_run: bool = True) -> Estimate:
        """Return the loss of a size; of infinity, E.

        Args:
            of_run: whether the interval is that of a further run, which differs from the law as the others do.
        """
        x = (size / self.scale) ** -self.alphas
        means = self.floor + self.slope * x
        variance = np.where(self._bounded, x**2 / self._power, 1 / self._total + (x - self._mean) ** 2 / self._spread)
        half = np.sqrt(np.maximum(self._room, 0) * (variance + means**2 * of_run))
        inside = self._room >= 0
        bounds = (max(0, (means - half)[inside].min()), (means + half)[inside].max()) if self.spare else (None, None)
        return Estimate(means[self.best], *bounds)


def student_t(degrees: int) -> float:
    """Return the two-sided 95 % quantile of Student's t, from 1 degree of freedom on."""
    table = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
    return table[degrees - 1] if degrees <= len(table) else 1.96 + 2.7 / degrees
