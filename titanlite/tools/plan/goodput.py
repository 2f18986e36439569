"""Goodput: the share of the time that counts when machines fail, and the interval of saves at which it is largest.

A save holds training up for some seconds, and a failure costs half an interval and a start. The best interval between
saves is sqrt(2 x seconds of a save x seconds between failures): J. W. Young, A first order approximation to the optimum
checkpoint interval, CACM 17(9), 1974; J. T. Daly, FGCS 22(3), 2006.
"""

import math
from dataclasses import dataclass

from titanlite.schema import Checkpoint
from titanlite.tools.plan.estimate import Plan
from titanlite.tools.plan.time import HOST_LINK

DAY = 86400.0


@dataclass(frozen=True)
class Goodput:
    """Effect of failures on a run."""

    share: float
    """Share of the time in which steps are done that count."""
    steps_lost: float
    """Steps that a failure costs on average."""
    best_interval: float
    """Steps between saves at which the share is largest."""


def goodput(planned: Plan, checkpoint: Checkpoint, *, failures_a_day: float, start_seconds: float) -> Goodput:
    """Return the goodput of a planned run.

    Each save holds training up for as long as the copy to host memory takes, of which backward may hide a part.

    Args:
        start_seconds: from a failure until training goes on.
    """
    step, hold = planned.time.total, planned.state / HOST_LINK
    intervals = [interval for interval in (checkpoint.interval, checkpoint.local_interval) if interval]
    steps_lost = min(intervals) / 2
    lost = failures_a_day / DAY * (steps_lost * step + start_seconds)
    held = sum(hold / (interval * step + hold) for interval in intervals)
    best = math.sqrt(2 * hold * DAY / failures_a_day) / step
    return Goodput(max(0.0, (1 - held) * (1 - lost)), steps_lost, max(1.0, best))
