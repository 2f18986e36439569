"""Bandwidths of links, for `titanlite calibrate`: collectives as training runs them, and copies to host memory."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from titanlite.runtime.process_group import Ranks

Print = Callable[[str], None]
Call = Callable[[torch.Tensor, torch.Tensor, dist.ProcessGroup], object]
"""(whole buffer, this rank's part, group): runs one collective."""


@dataclass(frozen=True)
class Links:
    """Measured links. What a run does not have, such as a second node, is empty or None."""

    within_node: dict[str, float] = field(default_factory=dict)
    """Bytes a second that pass each member of a ring, by collective."""
    between_nodes: dict[str, float] = field(default_factory=dict)
    """The same between nodes, for each process of a node."""
    hop_seconds: float | None = None
    """Latency from one process to the next within a node."""


def measure_links(device: torch.device, ranks: Ranks, report: Print) -> Links:
    """Measure the collectives of FSDP and HSDP. All ranks call this together."""
    within, nodes = ranks.local_world_size, ranks.world_size // ranks.local_world_size
    links: dict[str, float] = {}
    network: dict[str, float] = {}
    hop = None
    if within > 1:
        groups = [dist.new_group(range(node * within, (node + 1) * within)) for node in range(nodes)]
        group = groups[ranks.rank // within]
        assert isinstance(group, dist.ProcessGroup)
        links = {name: bus_bandwidth(name, group, device) for name in COLLECTIVES}
        hop = seconds_of("all_gather", group, 64, device, calls=50) / (within - 1)
        report(f"links of {within} processes, {hop * 1e6:.1f} us a hop: {_listed(links)}")
    if nodes > 1:
        world = dist.group.WORLD
        assert world is not None
        network = {name: bus_bandwidth(name, world, device) / within for name in COLLECTIVES}
        report(f"network between {nodes} nodes, for each process: {_listed(network)}")
    return Links(links, network, hop)


def bus_bandwidth(name: str, group: dist.ProcessGroup, device: torch.device) -> float:
    """Return the bytes a second that pass each member of a ring in large collectives: the best of several sizes.

    Each byte of an all-reduce passes twice.
    """
    powers = (20, 23, 25) if device.type == "cpu" else (24, 26, 28)
    return max(bandwidth_at(name, group, device, 2**power, calls=5) for power in powers)


def bandwidth_at(name: str, group: dist.ProcessGroup, device: torch.device, size: int, *, calls: int) -> float:
    """Return the bytes a second that pass each member of a ring in collectives of `size` bytes."""
    members = group.size()
    seconds = seconds_of(name, group, size, device, calls=calls)
    return size * (members - 1) / members / seconds * (2 if name == "all_reduce" else 1)


def seconds_of(name: str, group: dist.ProcessGroup, size: int, device: torch.device, *, calls: int) -> float:
    """Return the median seconds of a collective over `size` bytes. All members make as many calls."""
    part = torch.zeros(max(1, size // 4 // group.size()), device=device)
    whole = torch.zeros(len(part) * group.size(), device=device)
    call = _exchange_parts if name == "reduce_scatter" and device.type == "cpu" else COLLECTIVES[name]
    found = []
    for _ in range(calls + 1):
        began = time.perf_counter()
        call(whole, part, group)
        if device.type != "cpu":
            torch.cuda.synchronize(device)
        found.append(max(time.perf_counter() - began, 1e-9))
    return statistics.median(found[1:])


def _exchange_parts(whole: torch.Tensor, part: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Reduce and scatter as training does on gloo (`cpu/collectives.py`)."""
    parts = torch.empty_like(whole)
    dist.all_to_all_single(parts, whole, group=group)
    torch.mean(parts.view(group.size(), -1), dim=0, out=part)


COLLECTIVES: dict[str, Call] = {
    "all_gather": lambda whole, part, group: dist.all_gather_into_tensor(whole, part, group=group),
    "reduce_scatter": lambda whole, part, group: dist.reduce_scatter_tensor(part, whole, group=group),
    "all_reduce": lambda whole, part, group: dist.all_reduce(whole, group=group),
}


def host_transfers(
    device: torch.device, timed: Callable[[Callable[[], object]], float], report: Print
) -> tuple[float, float]:
    """Return bytes a second of copies (from pinned host memory to the device, back), as CPU offload makes them."""
    size = 2**28
    host = torch.zeros(size // 4, pin_memory=True)
    there = torch.zeros(size // 4, device=device)
    to_device = size / timed(lambda: there.copy_(host, non_blocking=True))
    to_host = size / timed(lambda: host.copy_(there, non_blocking=True))
    report(f"host memory to the GPU {to_device / 1e9:.3g} GB/s, back {to_host / 1e9:.3g}")
    return to_device, to_host


def _listed(bandwidths: dict[str, float]) -> str:
    return ", ".join(f"{name} {rate / 1e9:.3g} GB/s" for name, rate in bandwidths.items())
