"""Plan of a pipeline: memory of its stages, each traced whole, and a step as long as its slowest stage makes it."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from titanlite.schema import Config
from titanlite.techniques.pipeline.stages import SPLIT_BACKWARD, blocks_of_stages
from titanlite.tools.plan.allocator import PoolSize
from titanlite.tools.plan.estimate import (
    Layout,
    Plan,
    Trace,
    estimate,
    gathers_once,
    model_of,
    planned_targets,
    trace_model,
    trained_model,
)
from titanlite.tools.plan.memory import Profile
from titanlite.tools.plan.time import Collective, Kernel, StepTime, collective_time, kernel_time
from titanlite.tools.plan.trace import traced_micro_batches
from titanlite.tools.plan.workload import Workload

SPLIT_BUBBLE = 1 / 3
"""Share of the bubble that is left where gradients of weights are computed later, if forward and both parts of backward
take equally long (arXiv:2401.10241, ZB-H1). V-shaped schedules can leave less."""


class Place(NamedTuple):
    """Ranks of the pipeline that are alike."""

    name: str
    rank: int
    """Rank on the axis."""
    ranks: int


def places(ranks: int) -> list[Place]:
    """Return the ranks that are traced. Of those in the middle, the first keeps the most micro-batches."""
    middle = [Place("second", 1, ranks - 2)] if ranks > 2 else []
    return [Place("first", 0, 1), *middle, Place("last", ranks - 1, 1)]


def plan_stages(config: Config, layout: Layout) -> Plan:
    """Return the plan of the rank that reserves the most memory, with the time of all.

    Raises:
        UserError: as `estimate.plan`.
    """
    spec, ranks = model_of(config), config.parallelism.pipeline_parallel_degree
    model, targets = trained_model(spec, config), planned_targets(config, vocab_size=spec.args.vocab_size)
    _, accumulation = config.training.batch_split(config.parallelism.degrees(layout.world_size).data_parallel)
    untraced = accumulation - traced_micro_batches(config, accumulation)
    traces: dict[Place, Trace] = {}
    for place in places(ranks):
        rank = place.rank * layout.world_size // ranks
        found = trace_model(config, spec.model_cls, spec.args, targets, layout, rank=rank)
        traces[place] = replace(
            found,
            profile=_with_buffers(found.profile, untraced * found.received),
            parameters=sum(it.numel() for it in model.parameters()),
            flops_per_token=model.flops_per_token(config.training.seq_len),
        )
    plans = {place: estimate(found, config, layout) for place, found in traces.items()}
    of_rank = len(blocks_of_stages(len(model.layers), config.parallelism)) // ranks
    workloads = [it.workload for it in traces.values()]
    time = pipeline_time(workloads, config, layout, accumulation=accumulation, stages_of_rank=of_rank)
    largest = max(plans.values(), key=lambda it: it.reserved)
    return replace(
        largest,
        time=time,
        mfu=largest.mfu * largest.time.total / time.total,
        flops=sum(place.ranks * it.flops for place, it in plans.items()) / ranks,
        stages={place.name: it.reserved for place, it in plans.items()},
    )


def _with_buffers(profile: Profile, size: int) -> Profile:
    """Return a profile with this many bytes more, which last: for what the stage receives of untraced micro-batches."""
    phases = {name: {**found, "other": found["other"] + size} for name, found in profile.phases.items()}
    pools = dict(profile.pools)
    if pools:
        largest = max(pools, key=lambda name: pools[name].peak)
        pools[largest] = PoolSize(pools[largest].peak + size, pools[largest].end + size)
    return Profile(phases, pools)


def pipeline_time(
    stages: Sequence[Workload], config: Config, layout: Layout, *, accumulation: int, stages_of_rank: int
) -> StepTime:
    """Return the time of a step: each micro-batch takes as long as in the slowest stage.

    The others wait for it, and all for the first and the last micro-batches (the bubble). Parameters are gathered
    before the first if they are kept, and gradients reduced after the last, which nothing hides.
    """
    parallelism, hardware = config.parallelism, layout.hardware
    ranks, schedule = parallelism.pipeline_parallel_degree, parallelism.pipeline_parallel_schedule
    bubble = (ranks - 1) / stages_of_rank * (SPLIT_BUBBLE if schedule in SPLIT_BACKWARD else 1)

    def computed(kernels: Iterable[Kernel]) -> float:
        return sum(kernel_time(it, hardware) for it in kernels)

    def sent(collectives: Iterable[Collective]) -> float:
        return sum(collective_time(it, hardware, layout.gpus_per_node) for it in collectives)

    of_stages = []
    for stage in stages:
        units = stage.units
        work = sum(computed((*it.forward, *it.backward)) for it in units)
        waits = sum(sent((*it.forward_waits, *it.backward_waits)) for it in units)
        once = sum(sent((*it.reduce, *it.all_reduce)) for it in units) + sent(stage.whole)
        gathers = sum(sent((*it.gather, *it.gather_again)) for it in units)
        if gathers_once(config):
            once += gathers
        else:
            waits += gathers
        of_stages.append((work + waits, work, waits, once, computed(stage.update)))
    micro_batch, work, waits, once, update = max(of_stages)
    total = (accumulation + bubble) * micro_batch + once + update
    compute = accumulation * work
    return StepTime(total, compute, total - compute - update, update, accumulation * waits + once)
