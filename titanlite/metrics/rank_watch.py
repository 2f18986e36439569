"""Watch over ranks: which one lags, or has gradients that are not finite."""

import logging
import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from titanlite.runtime.ranks import ranks_text

logger = logging.getLogger(__name__)

LAG = 1.2
"""Own time over the median of all ranks, from which on a rank lags."""
LEAST_LAG = 0.02
"""Seconds a step below which no rank lags."""
LAG_WINDOWS = 3
"""Log steps in a row at which a rank must lag before it is named."""


T = TypeVar("T")


@dataclass(frozen=True)
class RankMetrics(Generic[T]):
    """Metrics over a window: numbers of one rank, or tensors [ranks] of all."""

    own_seconds: T
    """Time a step in which the rank does not wait for other ranks, with its wait for data. NaN if not known."""
    data_wait_seconds: T
    """Seconds a step in which the rank waits for data."""
    compile_seconds: T
    compile_minus_elapsed: T
    """Seconds of compiling in the window, minus seconds of the window."""
    recompiles: T
    memory_gib: T
    num_alloc_retries: T
    grad_norm: T
    """L2 norm of the rank's part of the gradients, in the last step of the window."""


def gather_metrics(
    metrics: RankMetrics[float], *, device: torch.device, group: dist.ProcessGroup
) -> RankMetrics[Tensor]:
    """Return the metrics of every rank: float64 [ranks] on the CPU. Every rank calls it at the same steps."""
    own = torch.tensor(astuple(metrics), dtype=torch.float64, device=device)
    ranks = torch.tensor(astuple(metrics) * group.size(), dtype=torch.float64, device=device)
    gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # torch 2.13 renamed the function
    gather(ranks, own, group=group)
    return RankMetrics(*ranks.view(group.size(), -1).cpu().unbind(1))


def slowest_rank(ranks: RankMetrics[Tensor], hosts: Sequence[str]) -> dict[str, Any]:
    """Return the rank with the largest own time for a record, beside the median of all ranks."""
    times = ranks.own_seconds
    is_known = times.isfinite()
    if not is_known.any():
        return {}
    slowest = int(times.where(is_known, -math.inf).argmax())
    return {
        "slowest_rank": slowest,
        "slowest_host": hosts[slowest],
        "own_seconds_slowest": float(times[slowest]),
        "own_seconds_median": float(times[is_known].median()),
    }


class RankWatch:
    """Names ranks that differ from the others, once each.

    Args:
        hosts: name of each rank's host, in the order of ranks.
    """

    def __init__(self, hosts: Sequence[str]) -> None:
        self._hosts = hosts
        self._lagging = torch.zeros(len(hosts), dtype=torch.int64)
        """Log steps in a row at which each rank lags."""
        self._named: set[tuple[str, int]] = set()

    def warn(self, ranks: RankMetrics[Tensor], *, step: int, is_steady: bool) -> None:
        """Log a warning for each rank or host that is to be named at this log step.

        Args:
            ranks: metrics of all ranks.
            is_steady: whether times of this window are typical. Those of a start and of compiling are not.
        """
        lines = [*(self._lags(ranks, step) if is_steady else ()), *self._gradients(ranks, step)]
        for line in lines:
            logger.warning(line)

    def _lags(self, ranks: RankMetrics[Tensor], step: int) -> list[str]:
        if not ranks.own_seconds.isfinite().all():
            return []
        median, data_median = float(ranks.own_seconds.median()), float(ranks.data_wait_seconds.median())
        least = max(LAG * median, median + LEAST_LAG)
        self._lagging = (self._lagging + 1).where(ranks.own_seconds > least, 0)
        new = self._new("lag", self._lagging >= LAG_WINDOWS)
        times = ranks.own_seconds.tolist() if new else []
        lines = []
        for host in dict.fromkeys(self._hosts[rank] for rank in new):
            named = [rank for rank in new if self._hosts[rank] == host]
            worst = max(named, key=times.__getitem__)
            waits = float(ranks.data_wait_seconds[worst]) - data_median > (times[worst] - median) / 2
            who = f"{ranks_text(named)} of host {host} {'lags' if len(named) == 1 else 'lag'}"
            lines.append(
                f"{who}, and all others wait: {times[worst]:.3f} s of own time a step, the median of all ranks is "
                f"{median:.3f} s ({LAG_WINDOWS} log steps in a row, up to step {step}). Most of the difference is "
                f"{'the wait for data' if waits else 'compute'} (docs/metrics.md)"
            )
        return lines

    def _gradients(self, ranks: RankMetrics[Tensor], step: int) -> list[str]:
        is_finite = ranks.grad_norm.isfinite()
        if not is_finite.any():
            return []  # all ranks have the problem: the guard reports it
        return [
            f"rank {rank} of host {self._hosts[rank]}: its part of the gradients of step {step} is not finite, but "
            "that of other ranks is"
            for rank in self._new("gradients", ~is_finite)
        ]

    def _new(self, what: str, applies: Tensor) -> list[int]:
        """Return the ranks [ranks] to which something applies and that were not named for it before."""
        found = [rank for rank in applies.nonzero().flatten().tolist() if (what, rank) not in self._named]
        self._named.update((what, rank) for rank in found)
        return found
