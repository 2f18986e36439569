"""Difference of the hosts' clocks, which times in logs and ages of files depend on."""

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from titanlite.selfcheck.findings import Job, Result, gather

ROUNDS = 5
MOST = 1.0
"""Seconds of difference above which there is a warning."""


def check_clocks(job: Job, clock: Callable[[], float] = time.time) -> Result:
    """Compare the clock of each host with that of rank 0.

    Args:
        clock: returns the time of this host in seconds.
    """
    mine: dict[int, tuple[float, float]] = {}
    for leader in job.leaders[1:]:
        if job.ranks.rank == 0:
            mine[leader] = _difference(leader, clock)
        elif job.ranks.rank == leader:
            _answer(clock)
    found: dict[int, tuple[float, float]] = gather(mine)[0]
    if not found:
        return Result("one host: nothing to compare")
    farthest, (ahead, error) = max(found.items(), key=lambda item: abs(item[1][0]))
    warnings = [
        f"{job.hosts[leader]} is {abs(seconds):.3g} s {'ahead of' if seconds > 0 else 'behind'} {job.hosts[0]}: set "
        "their clocks with NTP (chrony, systemd-timesyncd)"
        for leader, (seconds, _) in found.items()
        if abs(seconds) > MOST
    ]
    return Result(f"at most {abs(ahead):.2g} s apart ({job.hosts[farthest]}, +- {error:.1g} s)", warnings=warnings)


def _difference(leader: int, clock: Callable[[], float]) -> tuple[float, float]:
    """Return (seconds that another rank's clock is ahead, half of the round trip), of the fastest of some round trips.

    The other clock is read between sending and receiving, and is compared with the middle of the two.
    """
    found = []
    for _ in range(ROUNDS):
        there = torch.zeros(1, dtype=torch.float64)
        began, sent = time.perf_counter(), clock()
        dist.send(there, leader)
        dist.recv(there, leader)
        trip = time.perf_counter() - began
        found.append((trip / 2, float(there) - (sent + trip / 2)))
    half_trip, ahead = min(found)
    return ahead, half_trip


def _answer(clock: Callable[[], float]) -> None:
    for _ in range(ROUNDS):
        dist.recv(torch.zeros(1, dtype=torch.float64), 0)
        dist.send(torch.full((1,), clock(), dtype=torch.float64), 0)
