"""Ranks that lag, or have gradients that are not finite, are named once; others never."""

import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple, replace

import pytest
import torch
from torch import nn

from tests.support.helpers import mentions, world
from titanlite.metrics.clock import StepClock
from titanlite.metrics.rank_watch import RankMetrics, RankWatch, slowest_rank
from titanlite.observer import CurrentPhase
from titanlite.runtime.ranks import host_names

HOSTS = ["a"] * 4 + ["b"] * 4
USUAL = RankMetrics(
    own_seconds=0.5, data_wait_seconds=0.01, compile_seconds=0.0, compile_minus_elapsed=-10.0, recompiles=0.0,
    memory_gib=50.0, num_alloc_retries=0.0, grad_norm=1.0,
)  # fmt: skip
Watched = Callable[..., list[str]]


def gathered(ranks: Sequence[RankMetrics[float]]) -> RankMetrics[torch.Tensor]:
    """Metrics of all ranks as `gather_metrics` returns them."""
    return RankMetrics(*torch.tensor([astuple(rank) for rank in ranks], dtype=torch.float64).unbind(1))


@pytest.fixture
def watched(caplog: pytest.LogCaptureFixture) -> Watched:
    """Pass a window to a watch over the ranks of HOSTS; return the new lines."""
    watches: dict[tuple[str, ...], RankWatch] = {}

    def pass_window(*changed: int, step: int = 10, hosts: Sequence[str] = HOSTS, **values: float) -> list[str]:
        """changed: ranks that have the values; with is_steady=False a window of a start."""
        is_steady = bool(values.pop("is_steady", True))
        watch = watches.setdefault(tuple(hosts), RankWatch(hosts))
        caplog.clear()
        ranks = [replace(USUAL, **values) if rank in changed else USUAL for rank in range(len(hosts))]
        watch.warn(gathered(ranks), step=step, is_steady=is_steady)
        return caplog.messages

    return pass_window


def test_a_rank_that_lags_is_named_once_with_what_it_does(watched: Watched) -> None:
    assert watched(5, own_seconds=0.7) == []
    assert watched(5, own_seconds=0.7) == []
    [line] = watched(5, own_seconds=0.7, step=40)
    assert mentions(line, "rank 5 of host b", "0.700 s", "0.500 s", "3 log steps", "step 40", "compute")
    assert [watched(5, own_seconds=0.7) for _ in range(20)] == [[]] * 20
    assert watched() == []
    [line] = [line for _ in range(4) for line in watched(5, 6, own_seconds=0.9, data_wait_seconds=0.4)]
    assert mentions(line, "rank 6 of host b", "wait for data"), "5 is known"


@pytest.mark.parametrize(
    ("ranks", "who"),
    [
        ((4, 5, 6, 7), "ranks 4-7 of host b lag,"),
        ((0,), "rank 0 of host a lags,"),
    ],
)
def test_ranks_of_a_host_are_named_together(watched: Watched, ranks: tuple[int, ...], who: str) -> None:
    [line] = [line for _ in range(5) for line in watched(*ranks, own_seconds=0.8)]
    assert line.startswith(who)


@pytest.mark.parametrize("usual", [0.005, 0.5])
def test_noise_names_nobody(usual: float, caplog: pytest.LogCaptureFixture) -> None:
    """Times differ by some percent, and some rank has a far longer step twice in a row."""
    draw, watch = random.Random(0), RankWatch(HOSTS)
    for step in range(160):
        times = [usual * draw.uniform(0.93, 1.07) for _ in HOSTS]
        times[step // 2 % 8] *= 3
        norm = 10 ** draw.uniform(-2, 2)  # of the whole gradient
        ranks = [
            replace(USUAL, own_seconds=seconds, grad_norm=norm * rank * draw.uniform(0.3, 3), memory_gib=50 + rank)
            for rank, seconds in enumerate(times)
        ]
        watch.warn(gathered(ranks), step=step, is_steady=True)
    if usual < 0.02:
        for step in range(20):  # many times the median, but of no weight
            ranks = [replace(USUAL, own_seconds=0.001 * (20 if rank == 3 else 1)) for rank in range(8)]
            watch.warn(gathered(ranks), step=step, is_steady=True)
    assert caplog.messages == []


def test_windows_of_a_start_and_unknown_times_name_nobody(watched: Watched) -> None:
    assert [watched(2, own_seconds=40.0, is_steady=False) for _ in range(5)] == [[]] * 5
    assert [watched(2, own_seconds=math.nan) for _ in range(5)] == [[]] * 5


def test_the_slowest_rank_of_a_record() -> None:
    ranks = [replace(USUAL, own_seconds=seconds) for seconds in (0.2, 0.9, 0.3, math.nan)]
    assert slowest_rank(gathered(ranks), HOSTS) == {
        "slowest_rank": 1, "slowest_host": "a", "own_seconds_slowest": 0.9, "own_seconds_median": 0.3,
    }  # fmt: skip
    assert slowest_rank(gathered(ranks[3:]), HOSTS) == {}


def test_gradients_of_one_rank_that_are_not_finite(watched: Watched) -> None:
    assert watched(*range(8), grad_norm=math.nan) == [], "the guard's matter"
    [line] = watched(1, grad_norm=math.nan, step=9)
    assert mentions(line, "rank 1 of host a", "step 9")
    [line] = watched(2, grad_norm=math.inf, step=9)
    assert mentions(line, "rank 2 of host a", "step 9")
    assert watched(1, grad_norm=math.inf, step=9) == []


def test_own_time_is_that_of_the_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time of blocks, of backward and after the step is no own time. Micro-batches add up."""
    now = [0.0]

    class Slow(nn.Linear):
        seconds = 0.0

        def forward(self, input: torch.Tensor) -> torch.Tensor:
            now[0] += self.seconds
            return super().forward(input)

    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    block, head = Slow(2, 2), Slow(2, 2)
    block.seconds, head.seconds = 100.0, 1.5
    model, own = nn.Sequential(block, head), StepClock(CurrentPhase(), torch.device("cpu"))
    own.follow(model)

    def step(micro_batches: int) -> float:
        for _ in range(micro_batches):
            model(torch.ones(1, 2))
            now[0] += 100.0
        return own.own_seconds()

    assert math.isnan(step(1)), "a step that was not measured"
    own.begin(is_measured=True)
    assert step(1) == pytest.approx(1.5)
    own.begin(is_measured=True)
    assert step(2) == pytest.approx(3.0)
    assert step(1) == pytest.approx(3.0), "the one before it"
    own.begin(is_measured=True)
    assert math.isnan(own.own_seconds()), "no head has run"
    own.begin(is_measured=True)
    with pytest.raises(RuntimeError):
        head(torch.ones(1, 3))
    assert math.isnan(step(1)), "a forward that raised has no end"


def test_hosts_of_one_name_are_told_apart(monkeypatch: pytest.MonkeyPatch, single_process_group: None) -> None:
    found = [("a", "0"), ("a", "0"), ("b", "1"), ("a", "2")]
    monkeypatch.setattr("titanlite.runtime.ranks.gather", lambda value, group: found)
    assert host_names(world()) == ["a (node 0)", "a (node 0)", "b", "a (node 2)"]
