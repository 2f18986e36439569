"""Links that `titanlite calibrate` measures, on processes of this machine.

tests/distributed/test_machines.py compares the results of its collectives with exact values.
"""

import pytest
import torch

from tests.support.helpers import run_ranks
from titanlite.runtime.process_group import Ranks
from titanlite.tools.plan.calibrate import Values, measure_links


def measured(rank: int, world_size: int, local_world_size: int) -> Values:
    return measure_links(torch.device("cpu"), Ranks(rank, world_size, rank % local_world_size, local_world_size))


@pytest.mark.nightly
def test_links_of_two_processes() -> None:
    for values in run_ranks(measured, 2, 2):
        assert [*values] == ["link_bandwidth"]
        assert 1e6 < float(values["link_bandwidth"]) < 1e12
