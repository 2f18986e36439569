"""Goodput of a planned run: the formula of Young and Daly."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from titanlite.schema import Checkpoint
from titanlite.tools.plan.estimate import Plan
from titanlite.tools.plan.goodput import DAY, Goodput, goodput
from titanlite.tools.plan.time import HOST_LINK

STEP, HOLD = 2.0, 0.5
"""Seconds of a step, and of a copy of the state to host memory."""


def of(checkpoint: dict[str, int], **options: Any) -> Goodput:
    planned = SimpleNamespace(time=SimpleNamespace(total=STEP), state=int(HOLD * HOST_LINK))
    return goodput(cast(Plan, planned), Checkpoint(**cast(Any, checkpoint)), **options)


def test_a_failure_costs_half_an_interval_and_a_start() -> None:
    found = of({"interval": 500}, failures_a_day=4, start_seconds=100)
    assert found.steps_lost == 250
    assert found.share == pytest.approx((1 - HOLD / (1000 + HOLD)) * (1 - 4 * (250 * STEP + 100) / DAY))


def test_the_best_interval_is_where_the_share_is_largest() -> None:
    best = of({"interval": 500}, failures_a_day=50, start_seconds=0).best_interval
    shares = {
        interval: of({"interval": interval}, failures_a_day=50, start_seconds=0).share for interval in range(1, 100)
    }
    assert abs(max(shares, key=lambda interval: shares[interval]) - best) <= 1
    assert best == pytest.approx((2 * HOLD * DAY / 50) ** 0.5 / STEP)


def test_local_copies_cost_little_and_save_much() -> None:
    shared = of({"interval": 500}, failures_a_day=20, start_seconds=60)
    local = of({"interval": 500, "local_interval": 10}, failures_a_day=20, start_seconds=60)
    assert (shared.steps_lost, local.steps_lost) == (250, 5)
    assert shared.share < 0.88 < 0.95 < local.share
