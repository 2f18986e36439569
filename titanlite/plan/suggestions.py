"""Where memory does not suffice: the options that would make a config smaller, each with its predicted peak."""

import logging
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

from titanlite.config.checks import find_conflicts
from titanlite.config.schema import Config
from titanlite.models.base import Model, ModelArgs, build_on_meta
from titanlite.optim import check_optimizer
from titanlite.plan.estimate import USABLE, Layout, Plan, is_gpu, plan
from titanlite.plan.search import Options, with_options

logger = logging.getLogger(__name__)

ENOUGH = 3
"""Ways that fit. Further ones cost more, and seconds to plan."""


@dataclass(frozen=True)
class Suggestion:
    """Options that lower the peak."""

    options: Options
    peak: int
    """Bytes, predicted."""
    fits: bool
    cost: str
    """For people."""

    @property
    def words(self) -> str:
        """As they stand on the command line."""
        return " ".join(f"--{key}={_word(value)}" for key, value in self.options.items())

    def record(self) -> dict[str, Any]:
        return asdict(self) | {"options": self.words}


Attempt = Callable[[Options, str], Suggestion | None]
"""(options, their cost) -> what comes of it, planned; None if the config cannot take them."""


def _word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def suggestions(config: Config, kind: type[Model], args: ModelArgs, layout: Layout) -> list[Suggestion]:
    """Each planned in full: those that fit first, and then from cheap to dear. Where no option makes the config fit by
    itself, also what does so together, if anything does."""
    return [*suggestions_so_far(config, kind, args, layout, plan(config, kind, args, layout))][-1]


def suggestions_so_far(
    config: Config, kind: type[Model], args: ModelArgs, layout: Layout, present: Plan
) -> Iterator[list[Suggestion]]:
    """As `suggestions`, one more each time, in the end all.

    Args:
        present: the plan of the config as it is.
    """
    attempt: Attempt = partial(_attempt, config, kind, args, layout)
    taken = partial(_changed, config, kind, args, layout)
    ways: list[Suggestion] = []
    for way in _alone(config, layout, present, attempt):
        ways += [way] if way and way.peak < present.peak else []
        yield _in_order(ways)
        if sum(way.fits for way in ways) == ENOUGH:
            break
    if not any(way.fits for way in ways) and (joint := _together(ways, attempt, taken)):
        ways.append(joint)
    yield _in_order(ways)


def _in_order(ways: list[Suggestion]) -> list[Suggestion]:
    return sorted(ways, key=lambda way: not way.fits)


def _together(ways: list[Suggestion], attempt: Attempt, taken: Callable[[Options], object]) -> Suggestion | None:
    """The fewest, from the cheapest on, that fit together. What does not go with cheaper ones is left out.

    Args:
        taken: whether the config takes these options.
    """
    unions: list[Options] = [{}]
    for way in ways:
        if taken(union := unions[-1] | way.options):
            unions.append(union)
    found, least, most = None, 2, len(unions) - 1
    count = most
    while least <= most:
        joint = attempt(unions[count], "together")
        if joint and joint.fits:
            found, most = joint, count - 1
        elif count == len(unions) - 1:
            return None
        else:
            least = count + 1
        count = (least + most) // 2
    return found


def _alone(config: Config, layout: Layout, present: Plan, attempt: Attempt) -> Iterator[Suggestion | None]:
    """From cheap to dear."""
    yield _smaller_batch(config, layout, present, attempt)
    for options, cost in _candidates(config, layout):
        yield attempt(options, cost)


def _smaller_batch(config: Config, layout: Layout, present: Plan, attempt: Attempt) -> Suggestion | None:
    """Half of the local batch; if that does not fit, the largest part that does; if none does, one sequence. Memory
    grows about evenly with sequences, so few are planned."""
    micro, accumulation = config.training.batch_split(layout.world_size)
    sizes = [size for size in range(micro // 2, 0, -1) if micro * accumulation % size == 0]
    room, best, above = USABLE * layout.hardware.memory, None, (micro, present.peak)
    while sizes:
        size = sizes[0]
        way = attempt({"training.local_batch_size": size}, "same results, by more and smaller forward passes")
        if way is None or way.peak >= above[1]:
            break
        best = way
        if way.fits:
            break
        each = (above[1] - way.peak) / (above[0] - size)
        above = size, way.peak
        fitting = [less for less in sizes[1:] if way.peak - each * (size - less) <= room]
        sizes = fitting or sizes[1:][-1:]
    return best


def _candidates(config: Config, layout: Layout) -> Iterator[tuple[Options, str]]:
    """What is not the batch."""
    training, parallelism, mode = config.training, config.parallelism, config.activation_checkpoint.mode
    if mode == "none":
        yield ({"activation_checkpoint.mode": "selective"}, "computes again in backward what is cheap")
    if mode != "full":
        yield ({"activation_checkpoint.mode": "full"}, "computes forward again: about a third more arithmetic")
    if parallelism.fsdp_reshard_after_forward != "always":
        options: Options = {"parallelism.fsdp_reshard_after_forward": "always"}
        yield (options, "gathers parameters again for backward: more communication")
    if parallelism.data_parallel_replicate_degree > 1:
        degrees = "parallelism.data_parallel_replicate_degree", "parallelism.data_parallel_shard_degree"
        yield (dict(zip(degrees, (1, -1), strict=True)), "shards over all processes: messages cross nodes")
    if config.optimizer.state_dtype != "bfloat16":
        yield ({"optimizer.state_dtype": "bfloat16"}, "rounds AdamW's moments")
    if not config.optimizer.in_backward:
        options = {"optimizer.in_backward": True} | ({"training.max_norm": 0.0} if training.max_norm else {})
        yield (options, "updates in backward, where gradients are freed: none is clipped")
    if config.optimizer.name == "AdamW" and find_spec("torchao"):
        yield ({"optimizer.name": "torchao.optim.AdamW8bit"}, "rounds AdamW's moments to 8 bits; a compiled update")
    if config.offload.optimizer != "disk":
        yield ({"offload.optimizer": "disk"}, "AdamW's moments on a local disk, read and written in each step")
    if is_gpu(layout) and not training.enable_cpu_offload:
        yield ({"training.enable_cpu_offload": True}, "parameters and updates in host memory: much slower steps")


def _changed(config: Config, kind: type[Model], args: ModelArgs, layout: Layout, options: Options) -> Config | None:
    """None: the config cannot take these options."""
    try:
        changed = with_options(config, options)
    except ValueError:
        return None
    if find_conflicts(changed, layout.world_size, ()):
        return None
    model = build_on_meta(kind, args)
    return None if check_optimizer(changed.optimizer, model, dtype=changed.training.dtype) else changed


def _attempt(
    config: Config, kind: type[Model], args: ModelArgs, layout: Layout, options: Options, cost: str
) -> Suggestion | None:
    try:
        if (changed := _changed(config, kind, args, layout, options)) is None:
            return None
        planned = plan(changed, kind, args, layout)
    except Exception:
        logger.debug(f"{options} cannot be planned", exc_info=True)
        return None
    return Suggestion(dict(options), planned.peak, planned.fits, cost)
