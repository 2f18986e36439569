"""Layouts of a world: the degrees that a search tries, and the work of an FSDP unit under each.

What the search knows of mesh axes stands here.
"""

from collections.abc import Iterable
from dataclasses import replace

from titanlite.config.checks import find_conflicts
from titanlite.runtime.errors import UserError
from titanlite.runtime.hardware import Hardware
from titanlite.schema import Config, Degrees, Parallelism
from titanlite.techniques import used
from titanlite.techniques.expert.exchange import check_experts
from titanlite.techniques.technique import Options
from titanlite.tools.plan.estimate import model_of, with_options
from titanlite.tools.plan.time import Collective, Group, Kernel, Unit, kernel_time, lasting

MOST_CONTEXT = 64
"""Largest number of ranks that split a sequence in a search."""

CONTEXT, EXPERT, TENSOR = (f"parallelism.{axis}_parallel_degree" for axis in ("context", "expert", "tensor"))


def all_degrees(world_size: int, context: int = 1, tensor: int = 1) -> list[Degrees]:
    """Return every way to split the ranks, from replicas alone to full sharding.

    Args:
        context: ranks that split a sequence.
        tensor: ranks that split layers.
    """
    rest = world_size // (context * tensor)
    shards = [degree for degree in range(1, rest + 1) if rest % degree == 0]
    return [Degrees(rest // shard, shard, context, tensor) for shard in shards]


def further_axes(parallelism: Parallelism, world_size: int, *, seq_len: int, gpus_per_node: int) -> list[Options]:
    """Return the options of further axes that a search tries, each list of degrees from the smallest.

    Experts are spread over a node at most, and layers too: both wait for their collectives.
    """
    if (
        parallelism.context_parallel_degree * parallelism.expert_parallel_degree * parallelism.tensor_parallel_degree
        > 1
    ):
        return []
    powers = [2**exponent for exponent in range(1, MOST_CONTEXT.bit_length()) if world_size % 2**exponent == 0]
    within_node = [degree for degree in powers if degree <= gpus_per_node]
    return [
        *({EXPERT: degree} for degree in within_node[-1:]),
        *({CONTEXT: degree} for degree in powers if seq_len % (2 * degree) == 0),
        *({TENSOR: degree} for degree in within_node),
    ]


def can_have(config: Config, options: Options, world_size: int) -> bool:
    """Return True if the config and its model allow these options of further axes, with full sharding."""
    full = {"parallelism.data_parallel_replicate_degree": 1, "parallelism.data_parallel_shard_degree": -1}
    changed = with_options(config, options | full)
    try:
        spec = model_of(changed)
        model = spec.build()
        for technique in used(changed):
            technique.check_model(changed, spec, model, world_size)
    except UserError:
        return False
    return not any(key.startswith("parallelism.") for key, _ in find_conflicts(changed, world_size, ()))


def can_share_experts(config: Config, sharded: int) -> bool:
    """Return True if the config's experts can be on several ranks, of which so many share parameters."""
    experts = config.parallelism.expert_parallel_degree
    if experts == 1 or sharded % experts:
        return experts == 1
    try:
        check_experts(
            model_of(config).build(), experts, sharded, split_layers=config.parallelism.tensor_parallel_degree > 1
        )
    except UserError:
        return False
    return True


def grow(one: Unit, two: Unit, further: float, hardware: Hardware) -> Unit:
    """Return the unit with more sequences. Its time grows linearly.

    Args:
        one: the unit with the fewest sequences.
        two: the unit with more of them.
        further: steps from one to two, and as far again.
    """

    def grown(first: Iterable[Kernel], second: Iterable[Kernel]) -> tuple[Kernel, ...]:
        least, more = (sum(kernel_time(kernel, hardware) for kernel in it) for it in (first, second))
        return (lasting(least + further * (more - least), hardware),)

    def grown_waits(first: Iterable[Collective], second: Iterable[Collective]) -> tuple[Collective, ...]:
        pairs = zip(first, second, strict=True)
        return tuple(it._replace(bytes=round(it.bytes + further * (more.bytes - it.bytes))) for it, more in pairs)

    return replace(
        one,
        forward=grown(one.forward, two.forward),
        backward=grown(one.backward, two.backward),
        forward_waits=grown_waits(one.forward_waits, two.forward_waits),
        backward_waits=grown_waits(one.backward_waits, two.backward_waits),
    )


def lay_out(
    unit: Unit,
    degrees: Degrees,
    *,
    full: int,
    reshard: str,
    reduce_once: bool,
    gpus_per_node: int,
    stays_gathered: bool = False,
) -> Unit:
    """Return the unit with the collectives of another layout, from those of full sharding.

    Args:
        full: ranks that share parameters in full sharding. Experts on several ranks are shared by fewer.
        reshard: the option fsdp_reshard_after_forward.
        reduce_once: whether gradients are reduced after the last micro-batch only.
        stays_gathered: whether the unit is gathered in the first step only.
    """
    neighbours = gpus_per_node // degrees.tensor  # ranks of a node that hold the same part of layers
    replicas = Group(degrees.replicate, max(1, min(degrees.replicate, neighbours // degrees.sharded)))
    if degrees.replicate * degrees.sharded == 1:
        return unit

    def shards(each: Collective) -> Group:
        experts = full // each.group.size  # ranks with different experts, which are neighbours
        size = degrees.sharded // experts
        return Group(size, max(1, min(size, neighbours // experts)))

    def over_shards(collectives: Iterable[Collective]) -> tuple[Collective, ...]:
        return tuple(each._replace(group=shards(each)) for each in collectives if shards(each).size > 1)

    gradients = reductions(unit)
    all_reduce = tuple(Collective("all_reduce", each.bytes // shards(each).size, replicas) for each in gradients)
    return replace(
        unit,
        gather=() if stays_gathered else over_shards(unit.gather),
        gather_again=() if reshard == "never" else over_shards(unit.gather_again),
        reduce=() if reduce_once else over_shards(gradients),
        all_reduce=(
            *(over_shards(gradients) if reduce_once else ()),
            *(all_reduce if degrees.replicate > 1 else ()),
        ),
    )


def reductions(unit: Unit) -> tuple[Collective, ...]:
    """Return the reduce-scatters of a unit, after each micro-batch or after the last."""
    return tuple(it for it in (*unit.reduce, *unit.all_reduce) if it.op == "reduce_scatter")
