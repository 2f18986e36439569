"""A rank that does not arrive ends the others after the timeout of the phase."""

import time

import torch
import torch.distributed as dist

from tests.helpers import run_ranks
from titanlite.config.schema import Comm
from titanlite.runtime.timeouts import PhaseTimeouts

LATE = 3.0


def _steps(rank: int, world_size: int) -> list[str | float]:
    """All-reduce in four steps; rank 1 is late in the first and in the last. Return how each step ended."""
    phase = PhaseTimeouts(Comm(init_timeout_seconds=100, train_timeout_seconds=1))
    group = dist.new_group()  # the harness uses the first group to the end
    ends: list[str | float] = []
    for step in range(1, 5):
        phase.begin_step(step)
        if rank == 1 and step in (1, 4):
            time.sleep(LATE)
        started = time.monotonic()
        try:
            dist.all_reduce(value := torch.ones(1), group=group)
        except RuntimeError as error:
            ends += [str(error), time.monotonic() - started]
        else:
            ends.append(float(value))
    phase.phase("end")
    return ends


def test_a_late_rank_is_waited_for_at_the_start_and_ends_a_later_step() -> None:
    (*steps, error, seconds), _ = run_ranks(_steps, 2)
    assert steps == [2, 2, 2]
    assert "Timed out waiting 1000ms" in error
    assert 0.9 < seconds < LATE
