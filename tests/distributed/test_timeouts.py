"""A rank that does not arrive ends the others after the timeout of the phase."""

import time

import pytest
import torch
import torch.distributed as dist

from tests.support.helpers import run_ranks
from titanlite.observer import Phase
from titanlite.run.timeouts import PhaseTimeouts
from titanlite.runtime.private_torch.process_groups import connect_to_store, count_collectives
from titanlite.schema import Comm

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
    phase.enter(Phase.END)
    return ends


@pytest.mark.slow
def test_a_late_rank_is_waited_for_at_the_start_and_ends_a_later_step() -> None:
    (*steps, error, seconds), _ = run_ranks(_steps, 2)
    assert steps == [2, 2, 2]
    assert "Timed out waiting 1000ms" in error
    assert 0.9 < seconds < LATE


def _count(rank: int, world_size: int) -> tuple[dict[str, int], bytes]:
    """Count collectives, and read what rank 1 writes by its own connection to the store."""
    group = dist.new_group(group_desc="of this test")
    assert isinstance(group, dist.ProcessGroup)
    before = count_collectives()
    dist.all_reduce(torch.ones(1), group=group)
    dist.all_gather_into_tensor(torch.empty(2), torch.ones(1), group=group)
    dist.reduce_scatter_tensor(torch.empty(1), torch.ones(2), group=group)
    dist.all_to_all_single(torch.empty(2), torch.ones(2), group=group)
    dist.barrier(group=group)
    dist.broadcast(torch.ones(1), 0, group=group)
    started = {name: count - before[name] for name, count in count_collectives().items()}
    store = connect_to_store()
    if rank == 1:
        store.set("of this test", "written")
    return {name.partition(" ")[2]: count for name, count in started.items()}, store.get("of this test")


def test_gloo_counts_collectives_by_group() -> None:
    assert run_ranks(_count, 2) == [({"(default_pg)": 0, "(of this test)": 6}, b"written")] * 2
