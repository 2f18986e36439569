"""Watch over ranks: which one lags, and which one has far more memory or gradient than the others."""

import logging
import math
from collections import deque
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import astuple, dataclass
from statistics import median_low
from typing import Any

import torch
import torch.distributed as dist

from titanlite.runtime.ranks import ranks_text

logger = logging.getLogger(__name__)

LAG = 1.2
"""Own time over the median of all ranks, from which on a rank lags."""
LEAST_LAG = 0.02
"""Seconds a step below which no rank lags."""
LAG_WINDOWS = 3
"""Log steps in a row at which a rank must lag before it is named."""
MEMORY_EXCESS = 1.2
"""Memory over the median of all ranks, from which on a rank is named."""
LEAST_MEMORY_EXCESS = 1.0
"""GiB above the median below which no rank is named."""
GRADIENT_EXCESS = 10
"""Factor by which a rank's part of the gradients, over the median of all ranks, must exceed its own median so far."""
GRADIENT_HISTORY = 8, 64
"""Log steps in that median: the fewest and the most."""


@dataclass(frozen=True)
class RankMetrics:
    """Metrics of one rank over a window."""

    own_seconds: float
    """Time a step in which the rank does not wait for other ranks, with its wait for data. NaN if not known."""
    data_wait_seconds: float
    """A step."""
    compile_seconds: float
    compile_minus_elapsed: float
    """Seconds of compiling in the window, minus seconds of the window."""
    recompiles: float
    memory_gib: float
    num_alloc_retries: float
    grad_norm: float
    """L2 norm of the rank's part of the gradients, in the last step of the window."""


def gather_metrics(metrics: RankMetrics, *, device: torch.device, group: dist.ProcessGroup) -> list[RankMetrics]:
    """Return the metrics of every rank, in the order of ranks. Every rank calls it at the same steps."""
    own = torch.tensor(astuple(metrics), dtype=torch.float64, device=device)
    ranks = torch.tensor(astuple(metrics) * group.size(), dtype=torch.float64, device=device)
    gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # its name since torch 2.13
    gather(ranks, own, group=group)
    return [RankMetrics(*values) for values in ranks.view(group.size(), -1).tolist()]


def slowest_rank(ranks: Sequence[RankMetrics], hosts: Sequence[str]) -> dict[str, Any]:
    """Return the rank with the largest own time for a record, beside the median of all ranks."""
    known = [it.own_seconds for it in ranks if math.isfinite(it.own_seconds)]
    if not known:
        return {}
    largest = max(known)
    slowest = next(rank for rank, it in enumerate(ranks) if it.own_seconds == largest)
    return {
        "slowest_rank": slowest,
        "slowest_host": hosts[slowest],
        "own_seconds_slowest": largest,
        "own_seconds_median": median_low(known),
    }


class _Conspicuous:
    """Ranks to which a condition applies. Each is new once, and again after it did not apply for as long."""

    def __init__(self, count: int, *, windows: int) -> None:
        self._windows = windows
        self._applied = [0] * count
        self._ceased = [0] * count
        self._known: set[int] = set()

    def update(self, ranks: AbstractSet[int]) -> tuple[set[int], set[int]]:
        """Return the ranks to which the condition applied in all of the last windows, and which of them are new.

        Args:
            ranks: those to which it applies in this window.
        """
        for rank in range(len(self._applied)):
            applies = rank in ranks
            self._applied[rank] = self._applied[rank] + 1 if applies else 0
            self._ceased[rank] = 0 if applies else self._ceased[rank] + 1
            if self._ceased[rank] >= self._windows:
                self._known.discard(rank)
        lasting = {rank for rank, windows in enumerate(self._applied) if windows >= self._windows}
        new = lasting - self._known
        self._known |= lasting
        return lasting, new


class RankWatch:
    """Names ranks that differ from the others, once each.

    Args:
        hosts: name of each rank's host, in the order of ranks.
    """

    def __init__(self, hosts: Sequence[str]) -> None:
        self._hosts = hosts
        self._slow = _Conspicuous(len(hosts), windows=LAG_WINDOWS)
        self._large = _Conspicuous(len(hosts), windows=1)
        self._odd = _Conspicuous(len(hosts), windows=1)
        self._shares: list[deque[float]] = [deque(maxlen=GRADIENT_HISTORY[1]) for _ in hosts]

    def warn(self, ranks: Sequence[RankMetrics], *, step: int, is_steady: bool) -> None:
        """Log a warning for each rank or host that is to be named at this log step.

        Args:
            ranks: metrics of all ranks.
            is_steady: whether times of this window are typical. Those of a start and of compiling are not.
        """
        lines = [*(self._lags(ranks, step) if is_steady else ()), *self._memory(ranks), *self._gradients(ranks, step)]
        for line in lines:
            logger.warning(line)

    def _lags(self, ranks: Sequence[RankMetrics], step: int) -> list[str]:
        times = [it.own_seconds for it in ranks]
        if not all(map(math.isfinite, times)):
            return []
        median, data_median = median_low(times), median_low([it.data_wait_seconds for it in ranks])
        least = max(LAG * median, median + LEAST_LAG)
        lasting, new = self._slow.update({rank for rank, seconds in enumerate(times) if seconds > least})
        lines = []
        for host in dict.fromkeys(self._hosts[rank] for rank in sorted(new)):
            members = {rank for rank, other in enumerate(self._hosts) if other == host}
            is_whole = 1 < len(members) < len(ranks) and members <= lasting
            named = sorted(members if is_whole else members & new)
            worst = max(named, key=times.__getitem__)
            waits = ranks[worst].data_wait_seconds - data_median > (times[worst] - median) / 2
            who = f"all {len(members)} ranks" if is_whole else ranks_text(named)
            lines.append(
                f"{who} of host {host} {'lags' if len(named) == 1 else 'lag'}, and all others wait: {times[worst]:.3f} "
                f"s of own time a step, the median of all ranks is {median:.3f} s ({LAG_WINDOWS} log steps in a row, "
                f"up to step {step}). Most of the difference is {'the wait for data' if waits else 'compute'} "
                "(docs/running.md, Metrics)"
            )
        return lines

    def _memory(self, ranks: Sequence[RankMetrics]) -> list[str]:
        sizes = [it.memory_gib for it in ranks]
        median = median_low(sizes)
        least = max(MEMORY_EXCESS * median, median + LEAST_MEMORY_EXCESS)
        _, new = self._large.update({rank for rank, size in enumerate(sizes) if size > least})
        return [
            f"{self._name(rank)} takes {sizes[rank]:.2f} GiB of memory, the median of all ranks is {median:.2f} GiB"
            for rank in sorted(new)
        ]

    def _gradients(self, ranks: Sequence[RankMetrics], step: int) -> list[str]:
        """Parts of a gradient differ in size, but their shares hardly change."""
        norms = [it.grad_norm for it in ranks]
        finite = [norm for norm in norms if math.isfinite(norm)]
        if not finite or not (median := median_low(finite)):
            return []  # that is no matter of one rank
        odd: dict[int, str] = {}
        for rank, (norm, shares) in enumerate(zip(norms, self._shares, strict=True)):
            if not math.isfinite(norm):
                odd[rank] = "is not finite, but that of other ranks is"
                continue
            share, usual = norm / median, median_low(shares) if len(shares) >= GRADIENT_HISTORY[0] else math.inf
            if share > GRADIENT_EXCESS * max(usual, 1):
                odd[rank] = (
                    f"has norm {norm:.4g}, {share:.4g} times the median of all ranks; {usual:.3g} times is usual for it"
                )
            shares.append(share)
        _, new = self._odd.update(odd.keys())
        return [f"{self._name(rank)}: its part of the gradients of step {step} {odd[rank]}" for rank in sorted(new)]

    def _name(self, rank: int) -> str:
        return f"rank {rank} of host {self._hosts[rank]}"
