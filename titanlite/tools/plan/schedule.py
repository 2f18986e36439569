"""Step time: kernels and collectives in FSDP2's order, and how much of each collective is hidden."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from titanlite.runtime.hardware import Hardware
from titanlite.tools.plan.time import Collective, CollectiveName, Kernel, Unit, collective_time, kernel_time


@dataclass(frozen=True)
class CollectiveTime:
    """Seconds of all collectives of one kind in an optimizer step."""

    total: float
    hidden: float
    """Time in which kernels run beside them."""


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
    by_collective: dict[CollectiveName, CollectiveTime] = field(default_factory=dict)
    """The same by kind. A gather can run beside collectives of activations, which kernels wait for. Then the sum of
    what is not hidden here is more than `exposed`."""


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

    def timed(collectives: Sequence[Collective]) -> tuple[_Timed, ...]:
        found = (_Timed(it.op, collective_time(it, hardware, gpus_per_node)) for it in collectives)
        return tuple(it for it in found if it.seconds)

    def computed(kernels: Sequence[Kernel]) -> float:
        return sum(kernel_time(kernel, hardware) for kernel in kernels)

    passes = [_Pass(computed(it.forward), timed(it.gather), waits=timed(it.forward_waits)) for it in units]
    for index, it in enumerate(reversed(units)):  # the last unit still has its parameters when backward begins
        collectives = timed(it.gather_again), timed(it.reduce), timed(it.all_reduce)
        passes.append(_Pass(computed(it.backward), *collectives, ahead=index > 0, waits=timed(it.backward_waits)))
    last = _micro_batch(passes, is_last=True)
    parts = [last, *[_micro_batch(passes, is_last=False)] * (accumulation - 1)]
    outside = timed(whole)
    ran = [it for part in parts for it in part.collectives] + [_Ran(it.op, it.seconds, 0.0) for it in outside]
    by_collective = _by_kind(ran, overlaps=hardware.overlaps)
    compute = accumulation * last.compute
    communication = sum(it.total for it in by_collective.values())
    waiting = sum(it.seconds for it in outside)
    worked = compute + communication
    if hardware.overlaps:
        worked = sum(part.seconds for part in parts) + waiting
    updating = computed(update)
    return StepTime(
        worked + updating,
        compute,
        max(0.0, worked - compute),
        updating,
        communication,
        by_collective,
    )


class _Timed(NamedTuple):
    """A collective and its seconds."""

    op: CollectiveName
    seconds: float


class _Ran(NamedTuple):
    """A collective, its seconds, and those in which kernels run beside it."""

    op: CollectiveName
    seconds: float
    hidden: float


def _by_kind(ran: Sequence[_Ran], *, overlaps: bool) -> dict[CollectiveName, CollectiveTime]:
    totals, hidden = dict[CollectiveName, float](), dict[CollectiveName, float]()
    for it in ran:
        totals[it.op] = totals.get(it.op, 0.0) + it.seconds
        hidden[it.op] = hidden.get(it.op, 0.0) + (it.hidden if overlaps else 0.0)
    return {op: CollectiveTime(total, min(total, hidden[op])) for op, total in totals.items()}


class _Pass(NamedTuple):
    """Forward or backward of a unit: seconds of its kernels, and its collectives."""

    compute: float
    gather: tuple[_Timed, ...]
    reduce: tuple[_Timed, ...] = ()
    all_reduce: tuple[_Timed, ...] = ()
    ahead: bool = True
    """The gather is issued when the pass before begins, and not when it ends."""
    waits: tuple[_Timed, ...] = ()


class _MicroBatch(NamedTuple):
    """One micro-batch on a device that overlaps kernels and collectives."""

    seconds: float
    """Time from the first gather to the end of the last kernel and the last collective."""
    compute: float
    collectives: list[_Ran]


class _Link:
    """Runs one collective after the other."""

    def __init__(self) -> None:
        self.free = 0.0
        self.ran: list[tuple[CollectiveName, float, float]] = []
        """(kind, begin, end)."""

    def run(self, collectives: Sequence[_Timed], *, issued: float) -> float:
        """Return the time when the last collective ends. No collectives wait for nothing."""
        if not collectives:
            return issued
        self.free = max(self.free, issued)
        for op, seconds in collectives:
            self.ran.append((op, self.free, self.free + seconds))
            self.free += seconds
        return self.free

    def occupy(self, collectives: Sequence[_Timed], *, issued: float) -> None:
        """Take the time of collectives that kernels wait for. They are counted where the kernels wait."""
        if collectives:
            self.free = max(self.free, issued) + sum(it.seconds for it in collectives)


def _micro_batch(passes: Sequence[_Pass], *, is_last: bool) -> _MicroBatch:
    link, compute = _Link(), _Compute()
    waited: list[_Ran] = []
    gathered = link.run(passes[0].gather, issued=0.0)
    done = 0.0
    for work, following in pairwise((*passes, _Pass(0.0, ()))):
        began = max(done, gathered)
        waits = sum(it.seconds for it in work.waits)
        done = began + work.compute + waits
        compute.add(began + waits, done)
        waited += [_Ran(it.op, it.seconds, 0.0) for it in work.waits]
        link.occupy(work.waits, issued=began)
        if following.ahead:
            gathered = link.run(following.gather, issued=began)
        link.run(work.reduce + (work.all_reduce if is_last else ()), issued=done)
        if not following.ahead:
            gathered = link.run(following.gather, issued=done)
    beside = [_Ran(op, end - begin, compute.until(end) - compute.until(begin)) for op, begin, end in link.ran]
    return _MicroBatch(max(done, link.free), sum(work.compute for work in passes), waited + beside)


class _Compute:
    """Times in which kernels run."""

    def __init__(self) -> None:
        self.begins, self.before, self.lengths = [0.0], [0.0], [0.0]

    def add(self, begin: float, end: float) -> None:
        """Add an interval after all others."""
        self.before.append(self.before[-1] + self.lengths[-1])
        self.begins.append(begin)
        self.lengths.append(end - begin)

    def until(self, time: float) -> float:
        """Return the seconds of kernels before a time."""
        index = bisect_right(self.begins, time) - 1
        return self.before[index] + min(self.lengths[index], time - self.begins[index])
