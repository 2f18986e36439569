"""Sums over ranks that have the same tokens."""

import torch
import torch.distributed as dist

from tests.support.helpers import run_ranks
from titanlite.runtime.ranks import reduce_over_ranks


def _count(rank: int, world_size: int) -> list[float]:
    counter, world = torch.tensor([7.0, 0.0, 11.0]), dist.group.WORLD
    assert world is not None
    losses, square = [torch.tensor(2.5), torch.tensor(float(rank == 3))], torch.tensor(1.0)  # the last one: a stop
    sums, square = reduce_over_ranks(losses, square, [counter], duplicates=world_size, world=world)
    return [*counter.tolist(), sums[0].item(), float(sums[1].item() > 0), square.item()]


def test_counts_of_six_ranks_with_the_same_tokens_are_whole_numbers() -> None:
    """The flag of one rank that asks to stop counts, too."""
    assert run_ranks(_count, 6) == [[7.0, 0.0, 11.0, 2.5, 1.0, 6.0]] * 6
