"""Layouts of a world: the degrees that a search tries, and the memory and work of a step under each.

What the search knows of mesh axes stands here.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product

from titanlite.config.checks import find_conflicts
from titanlite.runtime.errors import UserError
from titanlite.schema import Config, Degrees
from titanlite.techniques import places, used
from titanlite.techniques.technique import Options
from titanlite.tools.plan.allocator import PoolSize
from titanlite.tools.plan.estimate import Layout, Trace, model_of, with_options
from titanlite.tools.plan.time import Collective, Group, Unit, replicas_of

MOST_CONTEXT = 64
"""Largest number of ranks that split a sequence in a search."""

STATES = ("parameters", "gradients", "optimizer", "outer", "average")
"""Categories of memory that ranks share."""
COMPUTE_POOL = 0, False
"""The pool of large tensors of the stream that computes."""

AXES = "context", "expert", "tensor", "pipeline"
CONTEXT, EXPERT, TENSOR, PIPELINE = (f"parallelism.{axis}_parallel_degree" for axis in AXES)
SCHEDULES = "1F1B", "Interleaved1F1B"
"""Schedules of pipelines that a search tries."""
MOST_PIPELINE = 16


def all_degrees(world_size: int, context: int = 1, tensor: int = 1) -> list[Degrees]:
    """Return every way to split the ranks, from replicas alone to full sharding.

    Args:
        context: ranks that split a sequence.
        tensor: ranks that split layers.
    """
    rest = world_size // (context * tensor)
    shards = [degree for degree in range(1, rest + 1) if rest % degree == 0]
    return [Degrees(rest // shard, shard, context, tensor) for shard in shards]


def data_parallel(replicate: int = 1, shard: int = -1) -> Options:
    """Return the options of replicas and shards."""
    return {
        "parallelism.data_parallel_replicate_degree": replicate,
        "parallelism.data_parallel_shard_degree": shard,
    }


def layouts_with(
    config: Config, world_size: int, degrees: Mapping[str, Sequence[int]], more: Options | None = None
) -> Iterator[Options]:
    """Yield the options of layouts that the config and its model allow. All other processes shard parameters.

    Args:
        degrees: of further axes, by their names. Each is tried with each.
        more: options of all these layouts.
    """
    for found in product(*(degrees.get(axis, (1,)) for axis in AXES)):
        options = {**(more or {}), **dict(zip((CONTEXT, EXPERT, TENSOR, PIPELINE), found, strict=True))}
        if options[PIPELINE] > 1:
            options["training.local_batch_size"] = 1  # a pipeline needs several micro-batches in a step
        if can_have(config, options, world_size):
            yield options


def further_axes(config: Config, layout: Layout) -> Iterator[Options]:
    """Yield the options of further axes that a search tries, each list of degrees from the smallest.

    Experts are spread over a node at most, and layers too: both wait for their collectives.
    """
    powers = [degree for degree in powers_of_2(MOST_CONTEXT) if layout.world_size % degree == 0]
    within_node = [degree for degree in powers if degree <= layout.gpus_per_node]
    if all(getattr(config.parallelism, f"{axis}_parallel_degree") == 1 for axis in AXES):
        for axis, tried in {"expert": within_node[-1:], "context": powers, "tensor": within_node}.items():
            yield from layouts_with(config, layout.world_size, {axis: tried})


def pipelines(config: Config, layout: Layout, own: Options) -> Iterator[Options]:
    """Yield the options of pipelines that a search tries.

    Args:
        own: options of the best layout without a pipeline, whose split of layers and recomputation are tried.
    """
    tensor = sorted({own.get(TENSOR, 1), layout.gpus_per_node})
    kept = {key: value for key, value in own.items() if key.startswith(("activation_checkpoint.", "quantize."))}
    more = kept | data_parallel() | {"parallelism.fsdp_reshard_after_forward": "default"}
    for degree, ranks, schedule in product(powers_of_2(MOST_PIPELINE), tensor, SCHEDULES):
        more["parallelism.pipeline_parallel_schedule"] = schedule
        yield from layouts_with(config, layout.world_size, {"pipeline": [degree], "tensor": [ranks]}, more)


def powers_of_2(most: int) -> list[int]:
    return [2**exponent for exponent in range(1, most.bit_length())]


def can_have(config: Config, options: Options, world_size: int, replicate: int = 1) -> bool:
    """Return True if the config and its model allow these options of further axes.

    Args:
        replicate: number of replicas. The ranks of each share its parameters.
    """
    changed = with_options(config, options | data_parallel(replicate))
    if any(key.startswith("parallelism.") for key, _ in find_conflicts(changed, world_size, ())):
        return False
    try:
        check_techniques(changed, world_size)
    except UserError:
        return False
    return True


def check_techniques(config: Config, world_size: int) -> None:
    """Check that the techniques of a config fit its model.

    Raises:
        UserError: one does not. The message begins with its option.
    """
    spec = model_of(config)
    model = spec.build()
    for technique in used(config):
        try:
            technique.check_model(config, spec, model, world_size)
        except UserError as error:
            raise UserError(f"{technique.option}: {error}") from error


def lay_out(traced: Trace, before: Config, config: Config, layout: Layout, *, full: int, frozen: str | None) -> Trace:
    """Return the trace of a config from that of the same config with full sharding: ranks share, gather and reduce
    other parts, and may keep them on the host. Kernels stay as they are, but FSDP without shards casts and copies each
    parameter by itself: steps of tiny models, which are nothing but launches, then take up to a quarter longer.

    Args:
        before: the config that was traced.
        full: ranks that share parameters in full sharding. Experts on several ranks are shared by fewer.
        frozen: section of a frozen model. Its memory is a category of this name, and names of its units begin with it.
    """
    parallelism = config.parallelism
    degrees, reduce_once = parallelism.degrees(layout.world_size), parallelism.fsdp_reduce_gradients == "last"
    keeps = layout.world_size > 1 and (parallelism.fsdp_reshard_after_forward == "never" or degrees.sharded == 1)
    neighbours = layout.gpus_per_node // degrees.tensor  # number of ranks of a node that hold the same part of layers
    replicas = replicas_of(degrees, layout.gpus_per_node)

    def is_frozen(unit: Unit) -> bool:
        return unit.name.startswith(f"{frozen}.")

    def shards(each: Collective) -> Group:
        experts = full // each.group.size  # number of ranks with different experts, which are neighbours
        size = degrees.sharded // experts
        return Group(size, max(1, min(size, neighbours // experts)))

    def over_shards(collectives: Iterable[Collective]) -> tuple[Collective, ...]:
        return tuple(each._replace(group=shards(each)) for each in collectives if shards(each).size > 1)

    def laid_out(unit: Unit) -> Unit:
        gradients = [collective for collective in (*unit.reduce, *unit.all_reduce) if collective.op == "reduce_scatter"]
        all_reduce = [Collective("all_reduce", each.bytes // shards(each).size, replicas) for each in gradients]
        return replace(
            unit,
            gather=over_shards(unit.gather),
            gather_again=() if keeps else over_shards(unit.gather_again),
            reduce=() if reduce_once else over_shards(gradients),
            all_reduce=(
                *(over_shards(gradients) if reduce_once else ()),
                *(all_reduce if degrees.replicate > 1 and not config.outer.over_replicas else ()),
            ),
        )

    profile, units = traced.profile, traced.workload.units
    factor = full / degrees.sharded
    shared = {*STATES, frozen}
    kept = sum(collective.bytes for unit in units for collective in unit.gather if keeps and not is_frozen(unit))
    phases = {
        name: {
            category: round(size * factor) if category in shared else size + kept * (category == "all-gather")
            for category, size in sizes.items()
        }
        for name, sizes in profile.phases.items()
    }
    added = kept
    for category in filter(None, shared):
        added += round(profile.most(category) * factor) if category not in places(config) else 0
        added -= profile.most(category) if category not in places(before) else 0
    pools = {
        name: PoolSize(pool.peak + added, pool.end + added) if name == COMPUTE_POOL else pool
        for name, pool in profile.pools.items()
    }
    update = tuple(kernel._replace(bytes=kernel.bytes * full // degrees.sharded) for kernel in traced.workload.update)
    return replace(
        traced,
        profile=replace(profile, phases=phases, pools=pools),
        workload=replace(traced.workload, units=tuple(map(laid_out, units)), update=update),
    )
