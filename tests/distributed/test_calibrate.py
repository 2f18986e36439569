"""Links that `titanlite calibrate` measures, on processes of this machine."""

import pytest
import torch

from tests.helpers import run_ranks
from titanlite.plan.links import COLLECTIVES, Links, measure_links, seconds_of
from titanlite.runtime.process_group import Ranks

CPU = torch.device("cpu")


def measured(rank: int, world_size: int, local_world_size: int) -> tuple[Links, list[str], list[list[float]]]:
    """Return what a rank measures and prints, and what each collective leaves in the buffers of a known call."""
    lines: list[str] = []
    ranks = Ranks(rank, world_size, rank % local_world_size, local_world_size)
    links = measure_links(CPU, ranks, lines.append)
    group = torch.distributed.group.WORLD
    assert isinstance(group, torch.distributed.ProcessGroup)
    results = []
    for call in COLLECTIVES.values():
        whole, part = torch.full((4,), rank + 1.0), torch.full((4 // world_size,), rank + 1.0)
        call(whole, part, group)
        results.append([*whole.tolist(), *part.tolist()])
    assert seconds_of("reduce_scatter", group, 2**10, CPU, calls=3) > 0
    return links, lines, results


@pytest.mark.nightly
def test_links_of_two_processes() -> None:
    for rank, (links, lines, results) in enumerate(run_ranks(measured, 2, 2)):
        assert {*links.within_node} == {*COLLECTIVES}
        assert not links.between_nodes
        assert links.hop_seconds is not None
        assert 1e-7 < links.hop_seconds < 1
        assert all(1e6 < rate < 1e12 for rate in links.within_node.values())
        assert len(lines) == 1
        own = rank + 1.0
        assert results[0] == [1, 1, 2, 2, own, own], "gathered parts"
        assert results[1] == [own] * 4 + [3, 3], "summed parts"
        assert results[2] == [3] * 4 + [own, own], "sums"


@pytest.mark.nightly
def test_a_network_of_two_nodes() -> None:
    """Two nodes of one process: there are no links within a node."""
    for links, _, _ in run_ranks(measured, 2, 1):
        assert {*links.between_nodes} == {*COLLECTIVES}
        assert (links.within_node, links.hop_seconds) == ({}, None)
