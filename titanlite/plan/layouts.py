"""Layouts of a world: the degrees that a search tries, and the work of an FSDP unit under each.

What the search knows of mesh axes stands here.
"""

from collections.abc import Iterable
from dataclasses import replace

from titanlite.config.schema import Degrees
from titanlite.plan.time import Collective, Group, Kernel, Unit, kernel_time, lasting
from titanlite.runtime.hardware import Hardware

MOST_CONTEXT = 64
"""Largest number of ranks that split a sequence in a search."""


def all_degrees(world_size: int, context: int = 1) -> list[Degrees]:
    """Return every way to split the ranks, from replicas alone to full sharding.

    Args:
        context: ranks that split a sequence.
    """
    rest = world_size // context
    shards = [degree for degree in range(1, rest + 1) if rest % degree == 0]
    return [Degrees(rest // shard, shard, context) for shard in shards]


def full_sharding(world_size: int, context: int = 1) -> Degrees:
    """Return the degrees of the layout that a search traces, and derives the others from."""
    return Degrees(1, world_size // context, context)


def context_degrees(world_size: int, seq_len: int) -> list[int]:
    """Return the numbers of ranks that can split a sequence, from the smallest: powers of 2, at most `MOST_CONTEXT`."""
    powers = [2**exponent for exponent in range(1, MOST_CONTEXT.bit_length())]
    return [degree for degree in powers if world_size % degree == 0 and seq_len % (2 * degree) == 0]


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

    return replace(one, forward=grown(one.forward, two.forward), backward=grown(one.backward, two.backward))


def lay_out(
    unit: Unit, degrees: Degrees, *, reshard: str, reduce_once: bool, gpus_per_node: int, stays_gathered: bool = False
) -> Unit:
    """Return the unit with the collectives of another layout, from those of full sharding.

    Args:
        reshard: the option fsdp_reshard_after_forward.
        reduce_once: whether gradients are reduced after the last micro-batch only.
        stays_gathered: whether the unit is gathered in the first step only.
    """
    shards = Group(degrees.sharded, min(degrees.sharded, gpus_per_node))
    replicas = Group(degrees.replicate, max(1, min(degrees.replicate, gpus_per_node // degrees.sharded)))
    if degrees.replicate * degrees.sharded == 1:
        return unit

    def over_shards(collectives: Iterable[Collective]) -> tuple[Collective, ...]:
        return tuple(each._replace(group=shards) for each in collectives) if degrees.sharded > 1 else ()

    gradients = reductions(unit)
    all_reduce = tuple(Collective("all_reduce", each.bytes // degrees.sharded, replicas) for each in gradients)
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
