"""Collectives of all ranks: right values, bandwidths within a host, between hosts and over all, and slow neighbours."""

import statistics
import time
from collections.abc import Mapping

import torch
import torch.distributed as dist

from titanlite.plan.links import COLLECTIVES, Call, bandwidth_at
from titanlite.runtime.ranks import named_ranks
from titanlite.selfcheck.findings import Job, Result, gather, merge

CPU_SIZES, GPU_SIZES = (2**16, 2**20, 2**24), (2**20, 2**24, 2**28)
"""Bytes of a collective."""
LONGEST = 1.0
"""Seconds of a collective after which larger sizes are left out: a slow network would take minutes."""
SLOW = 0.5
"""Share of the median bandwidth below which a rank or a pair is slow."""

Group = dist.ProcessGroup


def check_values(device: torch.device, job: Job, calls: Mapping[str, Call] = COLLECTIVES) -> Result:
    """Compare the result of each collective with its exact value, at several sizes.

    Args:
        calls: collectives, by name.
    """
    sizes = CPU_SIZES if device.type == "cpu" else GPU_SIZES[:2]
    wrong = []
    for size in sizes:
        for name, call in calls.items():
            wrong += _wrong_values(name, call, max(1, size // 4 // job.ranks.world_size), device, job)
    value = f"{', '.join(calls)} right at {', '.join(f'{size:,}' for size in sizes)} bytes"
    return merge(gather(Result(problems=wrong)), job, value="wrong values" if any(gather(bool(wrong))) else value)


def _wrong_values(name: str, call: Call, length: int, device: torch.device, job: Job) -> list[str]:
    """Return a line if a collective over `length` float32 values a rank is wrong on this rank.

    Values are small integers, so that sums are exact in any order.
    """
    world, rank = job.ranks.world_size, job.ranks.rank
    factors = [other % 8 + 1 for other in range(world)]
    pattern = torch.arange(length * world).remainder_(16).add_(1).float()
    whole = (pattern * factors[rank]).to(device)
    part = (pattern[rank * length : (rank + 1) * length] * factors[rank]).to(device)
    expected = pattern * sum(factors)
    if name == "all_gather":
        expected = pattern * torch.tensor(factors).repeat_interleave(length)
        whole.zero_()
    call(whole, part, _world())
    found = part if name == "reduce_scatter" else whole
    expected = expected[rank * length : (rank + 1) * length] if name == "reduce_scatter" else expected
    found = found.cpu()  # the device may be at fault, and compare wrongly
    places = (found != expected).nonzero().flatten()
    if not len(places):
        return []
    first = int(places[0])
    return [
        f"{name} of {whole.nbytes:,} bytes gives wrong values: {len(places):,} of {len(found):,}, the first "
        f"{found[first]:g} instead of {expected[first]:g}: a faulty link, device or driver"
    ]


def check_bandwidths(device: torch.device, job: Job) -> list[tuple[str, Result]]:
    """Measure the bandwidth of each collective within hosts, between hosts, and over all ranks."""
    within, nodes, rank = job.ranks.local_world_size, job.nodes, job.ranks.rank
    scopes: list[tuple[str, Group | None]] = []
    if within > 1 and nodes > 1:
        scopes.append(("links in a host", _group([[*range(n, n + within)] for n in job.leaders], rank)))
        same_place = [[*range(place, nodes * within, within)] for place in range(within)]
        scopes.append(("links of hosts", _group(same_place, rank)))
    scopes.append(("links of all", _world()))
    return [(name, _bandwidths(group, device, job)) for name, group in scopes if group is not None]


def _world() -> Group:
    world = dist.group.WORLD
    assert world is not None
    return world


def _group(parts: list[list[int]], rank: int) -> Group | None:
    groups = [dist.new_group(part) for part in parts]
    found = next((group for group, part in zip(groups, parts, strict=True) if rank in part), None)
    return found if isinstance(found, dist.ProcessGroup) else None


def _bandwidths(group: Group, device: torch.device, job: Job) -> Result:
    """Measure bandwidths in a group, all groups of the job at the same time."""
    found: dict[str, dict[int, list[float]]] = {name: {} for name in COLLECTIVES}
    for size in CPU_SIZES if device.type == "cpu" else GPU_SIZES:
        began = time.perf_counter()
        for name in COLLECTIVES:
            found[name][size] = gather(bandwidth_at(name, group, device, size, calls=3))
        if max(gather(time.perf_counter() - began)) > LONGEST * len(COLLECTIVES) * 4:
            break
    largest = max(found["all_reduce"])
    rates = found["all_reduce"][largest]
    parts = []
    for name, by_size in found.items():
        values = "/".join(f"{statistics.median(of_ranks) / 1e9:.3g}" for of_ranks in by_size.values())
        parts.append(f"{name} {values} GB/s")
    sizes = "/".join(f"{size / 2**20:g}" for size in found["all_reduce"])
    return Result(f"{', '.join(parts)} at {sizes} MiB", warnings=_slow_ranks(rates, job))


def _slow_ranks(rates: list[float], job: Job) -> list[str]:
    usual = statistics.median(rates)
    slow = [rank for rank, rate in enumerate(rates) if rate < SLOW * usual]
    if not slow:
        return []
    least = min(rates) / 1e9
    return [f"{named_ranks(slow, job.hosts)}: {least:.3g} GB/s in all_reduce, the median is {usual / 1e9:.3g}"]


def check_neighbours(device: torch.device, job: Job) -> Result:
    """Measure each pair of neighbours in the ring of all ranks, and name the slowest pairs.

    Pairs in a host and pairs of two hosts are compared with their own median.
    """
    world = job.ranks.world_size
    size = 2**22 if device.type == "cpu" else 2**27
    pairs = [(rank, (rank + 1) % world) for rank in range(world if world > 2 else 1)]
    mine: dict[tuple[int, int], float] = {}
    for parity in (0, 1):  # a rank is in one pair at a time
        for pair in [pair for pair in pairs if pair[0] % 2 == parity and pair[1] != 0]:
            if job.ranks.rank in pair:
                mine[pair] = _exchange(pair, device, job.ranks.rank, size)
        dist.barrier()
    if world > 2 and job.ranks.rank in pairs[-1]:
        mine[pairs[-1]] = _exchange(pairs[-1], device, job.ranks.rank, size)
    rates: dict[tuple[int, int], float] = {}
    for of_rank in gather(mine):
        rates |= of_rank
    return slowest_pairs(rates, job)


def slowest_pairs(rates: Mapping[tuple[int, int], float], job: Job) -> Result:
    """Return the median and the least bandwidth of pairs, with a warning for each pair far below the median.

    Args:
        rates: bytes a second of each pair of ranks.
    """
    within = job.ranks.local_world_size
    kinds: dict[str, dict[tuple[int, int], float]] = {}
    for (a, b), rate in rates.items():
        kinds.setdefault("in a host" if a // within == b // within else "between hosts", {})[a, b] = rate
    values, warnings = [], []
    for kind, of_kind in kinds.items():
        usual = statistics.median(of_kind.values())
        values.append(f"{kind} {min(of_kind.values()) / 1e9:.3g} to {max(of_kind.values()) / 1e9:.3g} GB/s")
        for (a, b), rate in of_kind.items():
            if rate < SLOW * usual:
                place = named_ranks(sorted({a, b}), job.hosts)
                warnings.append(f"{place}: {rate / 1e9:.3g} GB/s, the median {kind} is {usual / 1e9:.3g}")
    return Result(", ".join(values), warnings=warnings)


def _exchange(pair: tuple[int, int], device: torch.device, rank: int, size: int) -> float:
    """Return the bytes a second in each direction of a pair that sends in both at once: the best of three."""
    mine, theirs = torch.zeros(2, size // 4, device=device)
    other = pair[1] if rank == pair[0] else pair[0]
    found = []
    for _ in range(4):
        began = time.perf_counter()
        for work in dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, mine, other), dist.P2POp(dist.irecv, theirs, other)]
        ):
            work.wait()
        if device.type != "cpu":
            torch.cuda.synchronize(device)
        found.append(size / max(time.perf_counter() - began, 1e-9))
    return max(found[1:])
