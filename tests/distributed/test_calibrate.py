"""Links that `titanlite calibrate` measures, on processes of this machine."""

import pytest
import torch

from tests.helpers import run_ranks
from titanlite.runtime.process_group import Ranks
from titanlite.tools.plan.calibrate import COLLECTIVES, Values, measure_links

CPU = torch.device("cpu")


def measured(rank: int, world_size: int, local_world_size: int) -> tuple[Values, list[list[float]]]:
    """Return what a rank measures, and what each collective leaves in the buffers of a known call."""
    values = measure_links(CPU, Ranks(rank, world_size, rank % local_world_size, local_world_size))
    group = torch.distributed.group.WORLD
    assert isinstance(group, torch.distributed.ProcessGroup)
    results = []
    for call in COLLECTIVES.values():
        whole, part = torch.full((4,), rank + 1.0), torch.full((4 // world_size,), rank + 1.0)
        call(whole, part, group)
        results.append([*whole.tolist(), *part.tolist()])
    return values, results


@pytest.mark.nightly
def test_links_of_two_processes() -> None:
    for rank, (values, results) in enumerate(run_ranks(measured, 2, 2)):
        assert [*values] == ["link_bandwidth"]
        assert 1e6 < float(values["link_bandwidth"]) < 1e12
        own = rank + 1.0
        assert results[0] == [1, 1, 2, 2, own, own], "gathered parts"
        assert results[1] == [own] * 4 + [3, 3], "summed parts"
        assert results[2] == [3] * 4 + [own, own], "sums"
