"""Map each sample to a source: exact shares, in O(1), from the sample's index alone.

Weights become whole numbers that add up to a period. The j-th of the c samples that a source has in a period is due at
(j + 1/2) / c of it, and samples are in the order in which they are due. So at every point each source has had its share
but for about one sample.
"""

from collections.abc import Sequence
from fractions import Fraction
from math import lcm

import numpy as np

MOST_PERIOD = 2**16


class Mixture:
    """Order in which the samples of several sources alternate.

    Args:
        weights: one positive number for each source; only their ratios count.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        counts = np.array(_whole_numbers(weights), dtype=np.int64)
        owner = np.repeat(np.arange(len(counts)), counts)
        number = np.concatenate([np.arange(count) for count in counts])
        # (2 j + 1) / 2c compared without rounding: numbers stay below 2^53.
        due = (2 * number + 1) / (2 * counts[owner])
        order = np.lexsort((owner, due))
        self.counts_in_period = counts
        self._source = owner[order]
        self._number = number[order]
        self._places = [np.flatnonzero(self._source == source) for source in range(len(counts))]

    def locate(self, sample: int) -> tuple[int, int]:
        """Return (source, number of samples of that source before this one)."""
        period, place = divmod(sample, len(self._source))
        source = int(self._source[place])
        return source, period * int(self.counts_in_period[source]) + int(self._number[place])

    def counts(self, samples: int) -> list[int]:
        """Count the samples of each source among the first `samples` samples."""
        periods, rest = divmod(samples, len(self._source))
        return [
            periods * int(count) + int(np.searchsorted(places, rest))
            for count, places in zip(self.counts_in_period, self._places, strict=True)
        ]

    def index(self, source: int, number: int) -> int:
        """Return the sample that `locate` maps to (source, number)."""
        period, place = divmod(number, int(self.counts_in_period[source]))
        return period * len(self._source) + int(self._places[source][place])


def _whole_numbers(weights: Sequence[float]) -> list[int]:
    """Return whole numbers in the ratio of the weights: exact, or rounded to 1 / MOST_PERIOD if the period is long."""
    exact = [Fraction(repr(float(weight))) for weight in weights]
    shares = [weight / sum(exact) for weight in exact]
    period = lcm(*(share.denominator for share in shares))
    if period <= MOST_PERIOD:
        return [int(share * period) for share in shares]
    parts = [max(1, int(share * MOST_PERIOD)) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda i: parts[i] - shares[i] * MOST_PERIOD)
    for i in by_remainder[: max(0, MOST_PERIOD - sum(parts))]:
        parts[i] += 1
    return parts
