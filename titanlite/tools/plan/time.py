"""Times of a step and of its parts: a roofline for each kernel, rings and trees for each collective.

The assumptions are the constants below, and the efficiencies of the hardware: what well-built kernels and NCCL commonly
reach. Not modelled: waiting for data.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple

from titanlite.runtime.dtypes import DTYPES
from titanlite.runtime.hardware import Hardware
from titanlite.schema import Config, Degrees
from titanlite.techniques.technique import Technique

MEMORY_EFFICIENCY = 0.8
"""Share of the memory bandwidth that kernels reach on long vectors: in training steps on an H100
(benchmarks/gpu/h100.json), where a copy reaches 0.9."""
BUS_EFFICIENCY = 0.8
"""Share of the bandwidth of link and network that long collectives reach."""
LAUNCH_SECONDS = 5e-6
"""Time of the host to launch a kernel. A shorter kernel waits for the next launch."""
HOP_SECONDS = 2e-6
"""Latency from one GPU to the next within a node."""
CONTENTION = 0.19
"""Share of the time beside a collective by which kernels take longer there, because NCCL's kernels occupy
multiprocessors: the mean that arXiv:2507.03114 measured."""
CLOCK_SPREAD = 0.03
"""Standard deviation of the clocks of GPUs of one kind, of their mean. All wait for the slowest (arXiv:2208.11035)."""
NETWORK_HOP_SECONDS = 5e-6
"""Latency from one node to the next."""
HOST_LINK = 50e9
"""Bytes a second between a GPU and the memory of its host, as PCIe 5 reaches. PCIe 4 has half of it."""
HOST_MEMORY = 130e9
"""Bytes a second of host memory for the optimizers of all ranks of a machine. One process with 16 cores reached it
beside an H200 (benchmarks/README.md)."""


KernelKind = Literal["matmul", "attention", "flash", "memory"]


class Kernel(NamedTuple):
    """Work of one kernel, or of several alike."""

    kind: KernelKind
    flops: float
    bytes: int
    """Read and written in device memory."""
    dtype: str
    """One of `DTYPES`, for all kinds but memory."""
    launches: int = 1


CollectiveName = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send"]


class Group(NamedTuple):
    """Processes that take part in a collective."""

    size: int
    per_node: int
    """Number of members that share a node: 1 if each is on another node, `size` if all are on one."""


def replicas_of(degrees: Degrees, gpus_per_node: int) -> Group:
    """Return the ranks that hold the same shards."""
    neighbours = gpus_per_node // degrees.tensor  # number of ranks of a node that hold the same part of layers
    return Group(degrees.replicate, max(1, min(degrees.replicate, neighbours // degrees.sharded)))


class Collective(NamedTuple):
    """One collective operation."""

    op: CollectiveName
    bytes: int
    """Size of the whole, unsharded buffer; of an all-to-all and of a send, of all that a rank sends."""
    group: Group
    beside: tuple[Kernel, ...] = ()
    """Kernels of the same unit that do not wait for it."""


@dataclass(frozen=True)
class Unit:
    """An FSDP unit: parameters that are gathered and freed together, with the work of one micro-batch."""

    name: str
    forward: tuple[Kernel, ...]
    backward: tuple[Kernel, ...]
    """Kernels of backward, and the recomputation of activation checkpointing."""
    gather: tuple[Collective, ...] = ()
    """All-gathers before forward."""
    gather_again: tuple[Collective, ...] = ()
    """All-gathers before backward."""
    reduce: tuple[Collective, ...] = ()
    """Reduce-scatters after backward of every micro-batch."""
    all_reduce: tuple[Collective, ...] = ()
    """Collectives after backward of the last micro-batch: all-reduces, and reduce-scatters that others do not have."""
    forward_waits: tuple[Collective, ...] = ()
    """Collectives of activations in forward, which other kernels wait for."""
    backward_waits: tuple[Collective, ...] = ()


def kernel_time(kernel: Kernel, hardware: Hardware) -> float:
    """Return the seconds of a kernel: the slower of arithmetic and memory traffic, and at least its launches.

    This is the roofline model (doi.org/10.1145/1498765.1498785). A CPU does its own launching, so launches are added
    there. Measured rates are what matmuls and copies reach, so only attention is slower, by the same ratio as on GPUs.
    What a device has no rate for is emulated with float32 matmuls. Kernels that are no matmuls compute in float32,
    without matrix units.
    """
    peak = getattr(hardware, DTYPES[kernel.dtype].rate) if kernel.kind != "memory" else None
    peak = (peak or hardware.fp32_flops) * hardware.clock
    share = getattr(hardware, f"{kernel.kind}_efficiency", hardware.matmul_efficiency)
    rate = peak * (share / hardware.matmul_efficiency if hardware.measured else share)
    arithmetic = kernel.flops / rate
    traffic = kernel.bytes / _bandwidth(hardware)
    launches = kernel.launches * LAUNCH_SECONDS
    work = max(arithmetic, traffic)
    return work + launches if hardware.measured else max(work, launches)


def _bandwidth(hardware: Hardware) -> float:
    """Return the memory bandwidth that kernels reach."""
    return hardware.memory_bandwidth * (1 if hardware.measured else MEMORY_EFFICIENCY)


def collective_time(collective: Collective, hardware: Hardware, gpus_per_node: int) -> float:
    """Return the seconds of a collective.

    Each byte of a ring passes every member. Each GPU has a network card, and members that share a node share the work
    of their cards: a group with 8 members in each node has 8 cards, a group with one member in each node has one.

    Latency is a hop for each other member within the node, and a hop for each other node. An all-reduce has both twice,
    but goes along a tree between nodes.
    """
    size, per_node = collective.group
    assert 1 <= per_node <= min(size, gpus_per_node), f"{collective.group} in nodes of {gpus_per_node}"
    if size == 1:
        return 0.0
    nodes = -(-size // per_node)
    if collective.op == "send":  # the stage sends to a neighbour
        is_near = nodes == 1
        rate = hardware.link_bandwidth if is_near else hardware.network_bandwidth
        return collective.bytes / (rate * BUS_EFFICIENCY) + (HOP_SECONDS if is_near else NETWORK_HOP_SECONDS)
    if collective.op == "all_to_all":
        return _all_to_all_time(collective, hardware)
    bus = hardware.link_bandwidth * BUS_EFFICIENCY
    if nodes > 1:
        bus = min(bus, per_node * hardware.network_bandwidth * BUS_EFFICIENCY)
    once = collective.bytes * (size - 1) / size / bus
    within = (per_node - 1) * HOP_SECONDS
    if collective.op == "all_reduce":
        return 2 * (once + within + math.ceil(math.log2(nodes)) * NETWORK_HOP_SECONDS)
    return once + within + (nodes - 1) * NETWORK_HOP_SECONDS


def waiting_time(collectives: Iterable[Collective], hardware: Hardware, gpus_per_node: int) -> float:
    """Return the seconds by which collectives of activations make a unit longer. Kernels beside them are slower."""
    total = 0.0
    for collective in collectives:
        seconds = collective_time(collective, hardware, gpus_per_node)
        beside = sum(kernel_time(kernel, hardware) for kernel in collective.beside) if hardware.overlaps else 0.0
        total += seconds - (1 - CONTENTION) * min(seconds, beside)
    return total


def _all_to_all_time(collective: Collective, hardware: Hardware) -> float:
    """Return the seconds of an all-to-all. Each rank sends its parts to the others directly, by its own network card
    beyond its node."""
    size, per_node = collective.group
    each = collective.bytes * hardware.exchange_share / size / BUS_EFFICIENCY
    within, beyond = (per_node - 1) / hardware.link_bandwidth, (size - per_node) / hardware.network_bandwidth
    return each * max(within, beyond) + (NETWORK_HOP_SECONDS if beyond else HOP_SECONDS)


def host_time(
    techniques: Iterable[Technique],
    config: Config,
    sizes: Mapping[str, float],
    accumulation: int,
    *,
    ranks: int,
    forward: float,
    backward: float = 0.0,
) -> float:
    """Return the seconds that host memory adds to a step, see `Technique.host_traffic`. Copies over the link hide
    behind nothing, but for those of activations beside the passes.

    Args:
        ranks: of a machine, which share its memory.
        forward: seconds of the kernels of a forward pass.
        backward: the same of a backward pass.
    """
    traffic = [technique.host_traffic(config, sizes, accumulation) for technique in techniques]
    link, memory, beside, passes = (sum(moved) for moved in zip(*traffic, strict=True))
    copied = sum(max(0.0, passes / HOST_LINK - seconds) for seconds in (forward, backward))
    updated = memory * ranks / HOST_MEMORY + max(0.0, beside * ranks / HOST_MEMORY - forward)
    return link / HOST_LINK + updated + accumulation * copied


# A step: kernels and collectives in FSDP2's order, and how much of the collectives is hidden


@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimizer step."""

    total: float
    compute: float
    """All kernels of forward and backward, slower beside collectives."""
    exposed: float
    """Time in which the device does nothing but wait for collectives."""
    update: float
    """Clipping and the optimizer."""
    communication: float
    """All collectives, hidden or not."""


class _Pass(NamedTuple):
    """Forward or backward of a unit: seconds of its kernels, and of its collectives."""

    compute: float
    gather: float
    reduce: float = 0.0
    all_reduce: float = 0.0
    ahead: bool = True
    """The gather is issued when the pass before begins, and not when it ends."""
    waits: float = 0.0


def step_time(
    units: Sequence[Unit],
    *,
    update: Sequence[Kernel],
    hardware: Hardware,
    gpus_per_node: int,
    accumulation: int,
    whole: Sequence[Collective] = (),
) -> StepTime:
    """Return the time of one optimizer step, as FSDP2 schedules it on a GPU: kernels in order, collectives beside them.

    Forward goes through the units, and backward through them in reverse. A unit waits for its gather, which is issued
    when the unit before begins (one ahead). Its gradients are reduced after its backward. Each micro-batch ends with
    its last reduction, and the update follows the last micro-batch. Collectives run one after the other in the order of
    issue. NCCL could run some side by side, but they share the network card. Kernels are slower beside them. On a CPU
    nothing overlaps.

    Args:
        units: in the order of forward.
        update: kernels of clipping and the optimizer.
        accumulation: micro-batches in a step.
        whole: collectives that belong to no unit. Nothing hides them.
    """
    assert units
    assert accumulation > 0

    def sent(collectives: Sequence[Collective]) -> float:
        return sum(collective_time(collective, hardware, gpus_per_node) for collective in collectives)

    def computed(kernels: Sequence[Kernel]) -> float:
        return sum(kernel_time(kernel, hardware) for kernel in kernels)

    def waits(collectives: Sequence[Collective]) -> float:
        return waiting_time(collectives, hardware, gpus_per_node)

    passes = [_Pass(computed(unit.forward), sent(unit.gather), waits=waits(unit.forward_waits)) for unit in units]
    for index, unit in enumerate(reversed(units)):  # the last unit still has its parameters when backward begins
        collectives = sent(unit.gather_again), sent(unit.reduce), sent(unit.all_reduce)
        passes.append(_Pass(computed(unit.backward), *collectives, ahead=index > 0, waits=waits(unit.backward_waits)))
    compute = accumulation * sum(pass_.compute for pass_ in passes)
    once, outside = sum(pass_.all_reduce for pass_ in passes), sent(whole)
    inside = sum(sent((*unit.forward_waits, *unit.backward_waits)) for unit in units)
    communication = accumulation * (sum(pass_.gather + pass_.reduce for pass_ in passes) + inside) + once + outside
    worked = compute + communication
    if hardware.overlaps:
        each, last = (_micro_batch(passes, is_last=is_last) for is_last in (False, True))
        worked = (accumulation - 1) * each[0] + last[0] + outside
        compute += (accumulation - 1) * each[1] + last[1]
    updating = computed(update)
    return StepTime(worked + updating, compute, max(0.0, worked - compute), updating, communication)


def _micro_batch(passes: Sequence[_Pass], *, is_last: bool) -> tuple[float, float]:
    """Return the seconds from the first gather to the end of the last kernel and the last collective, and those that
    kernels take longer beside collectives."""
    free = gathered = passes[0].gather
    done = slower = 0.0

    def send(seconds: float, issued: float) -> float:
        """Return the time when collectives end. No collectives wait for nothing."""
        nonlocal free
        if not seconds:
            return issued
        free = max(free, issued) + seconds
        return free

    for work, following in pairwise((*passes, _Pass(0.0, 0.0))):
        began = max(done, gathered)
        send(work.waits, began)
        if following.ahead:
            gathered = send(following.gather, began)
        added = CONTENTION * min(work.compute, max(0.0, free - began - work.waits))
        done, slower = began + work.compute + added + work.waits, slower + added
        send(work.reduce + (work.all_reduce if is_last else 0.0), done)
        if not following.ahead:
            gathered = send(following.gather, done)
    return max(done, free), slower
