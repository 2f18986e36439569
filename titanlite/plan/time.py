"""Step time: a roofline for each kernel, rings and trees for each message, and FSDP2's order of both.

The assumptions are the constants below, and the efficiencies of the hardware: what well-built kernels and NCCL are
commonly seen to reach. What is not modelled: that messages take memory bandwidth and a few multiprocessors from
kernels, waiting for data, ranks that are slower than others.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple

from titanlite.runtime.hardware import Hardware

MEMORY_EFFICIENCY = 0.85
"""Of the memory bandwidth, for kernels that read and write long vectors."""
BUS_EFFICIENCY = 0.8
"""Of the link's and of the network's bandwidth, for long messages."""
LAUNCH_SECONDS = 5e-6
"""On the host, for each kernel: kernels that take less time than this wait for the next launch."""
HOP_SECONDS = 2e-6
"""From one GPU to the next within a node."""
NETWORK_HOP_SECONDS = 5e-6
"""From one node to the next."""


HOST_LINK = 25e9
"""Bytes a second between a GPU and its host's memory: what PCIe 4 and 5 reach."""
HOST_MEMORY = 10e9
"""Bytes a second of host memory that the optimizer of one rank moves, beside those of the machine's other ranks."""


class Kernel(NamedTuple):
    """Work of the device, of one kernel or of several alike."""

    kind: Literal["matmul", "attention", "memory"]
    flops: float
    bytes: int
    """Read and written in device memory."""
    dtype: str
    """bfloat16, float32 or float8."""
    launches: int = 1


class Group(NamedTuple):
    """Processes that exchange messages."""

    size: int
    per_node: int
    """How many of its members share a node: 1 if each is on another, `size` if all are on one."""


class Message(NamedTuple):
    """A collective operation."""

    collective: Literal["all_gather", "reduce_scatter", "all_reduce"]
    bytes: int
    """Of the whole, unsharded buffer."""
    group: Group


@dataclass(frozen=True)
class Unit:
    """What FSDP gathers and frees together, with its work for one micro-batch."""

    name: str
    forward: tuple[Kernel, ...]
    backward: tuple[Kernel, ...]
    """With what activation checkpointing computes again."""
    gather: tuple[Message, ...] = ()
    """Before forward."""
    gather_again: tuple[Message, ...] = ()
    """Before backward."""
    reduce: tuple[Message, ...] = ()
    """After backward of every micro-batch."""
    all_reduce: tuple[Message, ...] = ()
    """After backward of the last micro-batch."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimizer step."""

    total: float
    compute: float
    """Of all kernels of forward and backward."""
    exposed: float
    """In which the device does nothing but wait for messages."""
    update: float
    """Clipping and the optimizer."""
    communication: float
    """Of all messages, hidden or not."""


def kernel_time(kernel: Kernel, hardware: Hardware) -> float:
    """Seconds: the slower of arithmetic and memory traffic (roofline: doi.org/10.1145/1498765.1498785), and never less
    than the launches take. On a CPU, which does its own launching, these come on top.

    Rates that were measured are what products and copies reach, so only attention is slower than them, by as much as it
    is elsewhere. Float8 on a device without it is emulated with float32 products. The arithmetic of a kernel that is no
    product is float32, beside the matrix units.
    """
    peaks = {"bfloat16": hardware.bf16_flops, "float32": hardware.fp32_flops, "float8": hardware.fp8_flops}
    peak = (peaks[kernel.dtype] if kernel.kind != "memory" else None) or hardware.fp32_flops
    share = hardware.attention_efficiency if kernel.kind == "attention" else hardware.matmul_efficiency
    arithmetic = kernel.flops / (peak * (share / hardware.matmul_efficiency if hardware.measured else share))
    traffic = kernel.bytes / _bandwidth(hardware)
    launches = kernel.launches * LAUNCH_SECONDS
    work = max(arithmetic, traffic)
    return work + launches if hardware.measured else max(work, launches)


def lasting(seconds: float, hardware: Hardware) -> Kernel:
    """A kernel that takes so long."""
    return Kernel("memory", 0, round(seconds * _bandwidth(hardware)), "float32", 0)


def _bandwidth(hardware: Hardware) -> float:
    """Of memory, that kernels reach."""
    return hardware.memory_bandwidth * (1 if hardware.measured else MEMORY_EFFICIENCY)


def message_time(message: Message, hardware: Hardware, gpus_per_node: int) -> float:
    """Seconds. Each byte of a ring passes every member; members that share a node share the work of its network cards,
    one a GPU, so a group with 8 in each node has 8 cards and a group with 1 in each node has one.

    Latency is a hop for each other member within the node, and between nodes a hop for each other node; an all-reduce
    has both twice, but goes between nodes along a tree.

    Args:
        gpus_per_node: GPUs in a node.
    """
    size, per_node = message.group
    assert 1 <= per_node <= min(size, gpus_per_node), f"{message.group} in nodes of {gpus_per_node}"
    if size == 1:
        return 0.0
    nodes = -(-size // per_node)
    bus = hardware.link_bandwidth
    if nodes > 1:
        bus = min(bus, per_node * hardware.network_bandwidth)
    once = message.bytes * (size - 1) / size / (bus * BUS_EFFICIENCY)
    within = (per_node - 1) * HOP_SECONDS
    if message.collective == "all_reduce":
        return 2 * (once + within + math.ceil(math.log2(nodes)) * NETWORK_HOP_SECONDS)
    return once + within + (nodes - 1) * NETWORK_HOP_SECONDS


def step_time(
    units: Sequence[Unit],
    *,
    update: Sequence[Kernel],
    hardware: Hardware,
    gpus_per_node: int,
    accumulation: int,
) -> StepTime:
    """Of one optimizer step, as FSDP2 schedules it on a GPU: kernels one after the other, messages beside them.

    Forward goes through the units, backward through them in reverse, starting with the last one at once. A unit waits
    for its gather, which is issued when the unit before begins (one ahead). Its gradients are reduced after its
    backward. Each micro-batch ends when its last reduction does, and the update follows the last. Messages go one after
    the other in the order in which they are issued, also those that NCCL could send side by side, within a node and
    between nodes: they share the network card, so this is cautious. On a CPU nothing overlaps.

    Args:
        units: in the order of forward.
        update: kernels of clipping and the optimizer.
        gpus_per_node: GPUs in a node.
        accumulation: micro-batches in a step.
    """
    assert units
    assert accumulation > 0
    passes = _passes(units, hardware, gpus_per_node=gpus_per_node)
    compute = accumulation * sum(work.compute for work in passes)
    communication = accumulation * sum(work.gather + work.reduce for work in passes)
    communication += sum(work.all_reduce for work in passes)
    updating = sum(kernel_time(kernel, hardware) for kernel in update)
    if hardware.overlaps:
        worked = (accumulation - 1) * _micro_batch(passes, is_last=False) + _micro_batch(passes, is_last=True)
    else:
        worked = compute + communication
    return StepTime(worked + updating, compute, max(0.0, worked - compute), updating, communication)


def offload_time(parameters: float, states: float, *, accumulation: int) -> float:
    """Seconds that CPU offload adds to a step; nothing of it is taken to be hidden.

    Args:
        parameters: bytes of this rank's part. They go to the device twice a micro-batch, and gradients come back.
        states: bytes of parameters, gradients and moments in host memory. The update reads them all, and writes all but
            the gradients.
    """
    return accumulation * 3 * parameters / HOST_LINK + 1.75 * states / HOST_MEMORY


class _Pass(NamedTuple):
    """Forward or backward of a unit: seconds."""

    compute: float
    gather: float
    reduce: float = 0.0
    all_reduce: float = 0.0
    ahead: bool = True
    """The gather is issued when the pass before begins, and not when it is done."""


def _passes(units: Sequence[Unit], hardware: Hardware, *, gpus_per_node: int) -> list[_Pass]:
    """Of a micro-batch, in order. The last unit still has its parameters when its backward would prefetch them."""

    def compute(kernels: Sequence[Kernel]) -> float:
        return sum(kernel_time(kernel, hardware) for kernel in kernels)

    def send(messages: Sequence[Message]) -> float:
        return sum(message_time(message, hardware, gpus_per_node) for message in messages)

    forward = [_Pass(compute(unit.forward), send(unit.gather)) for unit in units]
    backward = [
        _Pass(
            compute(unit.backward),
            send(unit.gather_again),
            send(unit.reduce),
            send(unit.all_reduce),
            ahead=index > 0,
        )
        for index, unit in enumerate(reversed(units))
    ]
    return forward + backward


class _Link:
    """Sends one message after the other."""

    def __init__(self) -> None:
        self.free = 0.0

    def send(self, seconds: float, *, issued: float) -> float:
        """When it has arrived; what takes no time waits for nothing."""
        if not seconds:
            return issued
        self.free = max(self.free, issued) + seconds
        return self.free


def _micro_batch(passes: Sequence[_Pass], *, is_last: bool) -> float:
    """Seconds from the first gather to the end of the last kernel and the last message."""
    link = _Link()
    gathered = link.send(passes[0].gather, issued=0.0)
    done = 0.0
    for work, following in pairwise((*passes, _Pass(0.0, 0.0))):
        began = max(done, gathered)
        done = began + work.compute
        if following.ahead:
            gathered = link.send(following.gather, issued=began)
        link.send(work.reduce + (work.all_reduce if is_last else 0.0), issued=done)
        if not following.ahead:
            gathered = link.send(following.gather, issued=done)
    return max(done, link.free)
