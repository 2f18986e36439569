"""Ranks that start with different software or config: real gloo ranks, and two processes as two hosts."""

import os

import torch

from tests.helpers import TinyRun, mentions, run_ranks
from titanlite.run.versions import check_equal_start, compare, facts_of
from titanlite.runtime.errors import UserError

CPU = torch.device("cpu")


def compared(rank: int, world_size: int, tiny: TinyRun) -> list[object]:
    """Compare equal facts, and another version on rank 1; then start with another option."""
    config = tiny.config(world_size=world_size)
    same = facts_of(config.model_dump(mode="json"), CPU)
    old = same | {"torch": "1.0"} if rank else same
    found: list[object] = [compare(same), compare(old)]
    other = tiny.config(f"--optimizer.lr={rank + 1}", world_size=world_size)
    try:
        check_equal_start(other.model_dump(mode="json"), CPU)
    except UserError as error:
        found.append(str(error))
    return found


def test_a_difference_is_found_on_every_rank(tiny: TinyRun) -> None:
    first, second = run_ranks(compared, 2, tiny)
    assert first == second
    equal, errors, config = first
    assert equal == []
    assert len(errors) == 1
    assert mentions(errors[0], "rank 1", "torch 1.0", f"rank 0 on {os.uname().nodename} has torch {torch.__version__}")
    assert mentions(config, "optimizer.lr = 2.0", "rank 0")
