"""Step time: kernels and collectives in FSDP2's order, and how much of the collectives is hidden."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from titanlite.runtime.hardware import Hardware
from titanlite.tools.plan.time import Collective, Kernel, Unit, collective_time, kernel_time


@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimizer step."""

    total: float
    compute: float
    """All kernels of forward and backward."""
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
    issue. NCCL could run some side by side, but they share the network card. On a CPU nothing overlaps.

    Args:
        units: in the order of forward.
        update: kernels of clipping and the optimizer.
        accumulation: micro-batches in a step.
        whole: collectives that belong to no unit. Nothing hides them.
    """
    assert units
    assert accumulation > 0

    def sent(collectives: Sequence[Collective]) -> float:
        return sum(collective_time(it, hardware, gpus_per_node) for it in collectives)

    def computed(kernels: Sequence[Kernel]) -> float:
        return sum(kernel_time(kernel, hardware) for kernel in kernels)

    passes = [_Pass(computed(it.forward), sent(it.gather), waits=sent(it.forward_waits)) for it in units]
    for index, it in enumerate(reversed(units)):  # the last unit still has its parameters when backward begins
        collectives = sent(it.gather_again), sent(it.reduce), sent(it.all_reduce)
        passes.append(_Pass(computed(it.backward), *collectives, ahead=index > 0, waits=sent(it.backward_waits)))
    compute = accumulation * sum(it.compute for it in passes)
    once, outside = sum(it.all_reduce for it in passes), sent(whole)
    communication = accumulation * sum(it.gather + it.reduce + it.waits for it in passes) + once + outside
    worked = compute + communication
    if hardware.overlaps:
        before = (accumulation - 1) * _micro_batch(passes, is_last=False)
        worked = before + _micro_batch(passes, is_last=True) + outside
    updating = computed(update)
    return StepTime(worked + updating, compute, max(0.0, worked - compute), updating, communication)


def _micro_batch(passes: Sequence[_Pass], *, is_last: bool) -> float:
    """Return the seconds from the first gather to the end of the last kernel and the last collective."""
    free = gathered = passes[0].gather
    done = 0.0

    def send(seconds: float, issued: float) -> float:
        """Return the time when collectives end. No collectives wait for nothing."""
        nonlocal free
        if not seconds:
            return issued
        free = max(free, issued) + seconds
        return free

    for work, following in pairwise((*passes, _Pass(0.0, 0.0))):
        began = max(done, gathered)
        done = began + work.compute + work.waits
        send(work.waits, began)
        if following.ahead:
            gathered = send(following.gather, began)
        send(work.reduce + (work.all_reduce if is_last else 0.0), done)
        if not following.ahead:
            gathered = send(following.gather, done)
    return max(done, free)
