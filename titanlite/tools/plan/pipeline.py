"""Plan of a pipeline: memory of its stages, each traced whole, and a step as long as its slowest stage makes it."""

from collections.abc import Iterable, Sequence

from titanlite.runtime.hardware import Hardware
from titanlite.schema import Parallelism
from titanlite.techniques.pipeline import SPLIT_BACKWARD
from titanlite.tools.plan.allocator import PoolSize
from titanlite.tools.plan.memory import Profile
from titanlite.tools.plan.time import Collective, StepTime, collective_time, kernel_time, waiting_time
from titanlite.tools.plan.workload import Workload

SPLIT_BUBBLE = 1 / 3
"""Share of the bubble that is left where gradients of weights are computed later, if forward and both parts of backward
take equally long (arXiv:2401.10241, ZB-H1). V-shaped schedules can leave less."""


def traced_ranks(ranks: int) -> dict[int, int]:
    """Return the ranks on the axis that are traced, and how many each stands for. Of those in the middle, the first
    keeps the most micro-batches."""
    return {0: 1, **({1: ranks - 2} if ranks > 2 else {}), ranks - 1: 1}


def with_buffers(profile: Profile, size: int) -> Profile:
    """Return a profile with this many bytes more, which last: for what the stage receives of untraced micro-batches."""
    phases = {name: {**found, "other": found["other"] + size} for name, found in profile.phases.items()}
    pools = dict(profile.pools)
    if pools:
        largest = max(pools, key=lambda name: pools[name].peak)
        pools[largest] = PoolSize(pools[largest].peak + size, pools[largest].end + size)
    return Profile(phases, pools)


def stage_work(stage: Workload, hardware: Hardware) -> float:
    """Return the seconds of the kernels of a micro-batch in a stage."""
    return sum(kernel_time(kernel, hardware) for unit in stage.units for kernel in (*unit.forward, *unit.backward))


def blocks_of_ends(work: Sequence[float], blocks: Sequence[int]) -> tuple[int, int]:
    """Return how many blocks the embedding and the head take as long as, rounded: what first and last stage should have
    less, so that all stages take equally long.

    Args:
        work: seconds of the traced ranks, in their order.
        blocks: of each of these ranks.
    """
    block = min(seconds / count for seconds, count in zip(work, blocks, strict=True))
    first, last = round(work[0] / block - blocks[0]), round(work[-1] / block - blocks[-1])
    return max(0, first), max(0, last)


def pipeline_time(
    stages: Sequence[Workload],
    parallelism: Parallelism,
    *,
    hardware: Hardware,
    gpus_per_node: int,
    accumulation: int,
    stages_of_rank: int,
) -> StepTime:
    """Return the time of a step: each micro-batch takes as long as in the slowest stage.

    The others wait for it, and all for the first and the last micro-batches (the bubble). Parameters are gathered
    before the first if they are kept, and gradients reduced after the last, which nothing hides.
    """
    ranks, schedule = parallelism.pipeline_parallel_degree, parallelism.pipeline_parallel_schedule
    bubble = (ranks - 1) / stages_of_rank * (SPLIT_BUBBLE if schedule in SPLIT_BACKWARD else 1)

    def sent(collectives: Iterable[Collective]) -> float:
        return sum(collective_time(collective, hardware, gpus_per_node) for collective in collectives)

    of_stages = []
    for stage in stages:
        units = stage.units
        work = stage_work(stage, hardware)
        inside = [collective for unit in units for collective in (*unit.forward_waits, *unit.backward_waits)]
        each, waits = sent(inside), waiting_time(inside, hardware, gpus_per_node)
        once = sum(sent((*unit.reduce, *unit.all_reduce)) for unit in units) + sent(stage.whole)
        gathers = sum(sent((*unit.gather, *unit.gather_again)) for unit in units)
        if parallelism.keeps_gathered:
            once += gathers
        else:
            each, waits = each + gathers, waits + gathers
        of_stages.append((work + waits, work, each, once, sum(kernel_time(k, hardware) for k in stage.update)))
    micro_batch, work, each, once, update = max(of_stages)
    total = (accumulation + bubble) * micro_batch + once + update
    compute = accumulation * work
    return StepTime(total, compute, total - compute - update, update, accumulation * each + once)
