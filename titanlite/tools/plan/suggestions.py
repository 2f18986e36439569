"""Suggestions: options that lower the peak memory of a config, each with its predicted peak."""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

from titanlite.config.checks import find_conflicts
from titanlite.optim.checks import check_optimizer
from titanlite.schema import Config
from titanlite.techniques import every_technique
from titanlite.techniques.technique import Options
from titanlite.tools.plan.estimate import Layout, Plan, model_of, plan
from titanlite.tools.plan.search import with_options

logger = logging.getLogger(__name__)

ENOUGH = 3
"""Suggestions that fit. Further ones cost more, and each takes seconds to plan."""


@dataclass(frozen=True)
class Suggestion:
    """Options that lower the peak."""

    options: Options
    peak: int
    """Predicted sum of tensors, in bytes."""
    fits: bool
    cost: str
    """A phrase for people."""

    @property
    def text(self) -> str:
        """The options as command-line arguments."""
        return " ".join(f"--{key}={_argument(value)}" for key, value in self.options.items())


EIGHT_BITS = 2
"""Place of moments in 8 bits among the `suggestions` of techniques."""
Attempt = Callable[[Options, str], Suggestion | None]
"""(options, cost) -> the planned suggestion, or None if the config does not accept the options."""


def _argument(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def suggest(config: Config, layout: Layout, present: Plan) -> list[Suggestion]:
    """Return options that lower the peak: those that fit first, each group from cheap to expensive.

    Every suggestion is planned in full.

    Args:
        present: the plan of the config as it is.
    """
    found: list[Suggestion] = []
    for suggestion in _single(config, layout, present, partial(_attempt, config, layout)):
        found += [suggestion] if suggestion and suggestion.peak < present.peak else []
        if sum(it.fits for it in found) == ENOUGH:
            break
    return sorted(found, key=lambda it: not it.fits)


def _single(config: Config, layout: Layout, present: Plan, attempt: Attempt) -> Iterator[Suggestion | None]:
    """Yield one suggestion for each option, from cheap to expensive."""
    yield _smaller_batch(config, layout, present, attempt)
    for options, cost in _candidates(config, layout):
        yield attempt(options, cost)


def _smaller_batch(config: Config, layout: Layout, present: Plan, attempt: Attempt) -> Suggestion | None:
    """Return half of the local batch, or the largest smaller part that fits, or one sequence.

    Memory grows about linearly with the number of sequences, so only a few sizes are planned.
    """
    micro, accumulation = config.training.batch_split(config.parallelism.degrees(layout.world_size).data_parallel)
    sizes = [size for size in range(micro // 2, 0, -1) if micro * accumulation % size == 0]
    room, best, above = layout.usable - (present.reserved - present.peak), None, (micro, present.peak)
    while sizes:
        size = sizes[0]
        suggestion = attempt({"training.local_batch_size": size}, "same results, by more and smaller forward passes")
        if suggestion is None or suggestion.peak >= above[1]:
            break
        best = suggestion
        if suggestion.fits:
            break
        each = (above[1] - suggestion.peak) / (above[0] - size)
        above = size, suggestion.peak
        fitting = [less for less in sizes[1:] if suggestion.peak - each * (size - less) <= room]
        sizes = fitting or sizes[1:][-1:]
    return best


def _candidates(config: Config, layout: Layout) -> Iterator[tuple[Options, str]]:
    """Yield (options, cost) of all options but the local batch size."""
    parallelism, mode = config.parallelism, config.activation_checkpoint.mode
    no_list: Options = {"activation_checkpoint.per_block": []} if mode == "per_block" else {}
    if mode == "none":
        yield ({"activation_checkpoint.mode": "selective"}, "recomputes in backward what is cheap")
    if mode != "full":
        yield ({"activation_checkpoint.mode": "full"} | no_list, "recomputes forward: about a third more arithmetic")
    if parallelism.fsdp_reshard_after_forward != "always":
        options: Options = {"parallelism.fsdp_reshard_after_forward": "always"}
        yield (options, "gathers parameters again for backward: more communication")
    if parallelism.data_parallel_replicate_degree > 1:
        degrees = "parallelism.data_parallel_replicate_degree", "parallelism.data_parallel_shard_degree"
        yield (dict(zip(degrees, (1, -1), strict=True)), "shards over all processes: collectives across nodes")
    if config.optimizer.state_dtype != "bfloat16":
        yield ({"optimizer.state_dtype": "bfloat16"}, "rounds AdamW's moments")
    offered = [it for technique in every_technique() for it in technique.suggestions(config, is_gpu=layout.is_gpu)]
    if config.optimizer.name == "AdamW" and find_spec("torchao"):
        eight = {"optimizer.name": "torchao.optim.AdamW8bit"}
        offered.append((EIGHT_BITS, eight, "rounds AdamW's moments to 8 bits; a compiled update"))
    for _, options, cost in sorted(offered, key=lambda it: it[0]):
        yield options, cost


def _attempt(config: Config, layout: Layout, options: Options, cost: str) -> Suggestion | None:
    try:
        changed = with_options(config, options)
        if find_conflicts(changed, layout.world_size, ()):
            return None
        if check_optimizer(changed.optimizer, model_of(changed).build(), dtype=changed.training.dtype):
            return None
        planned = plan(changed, layout)
    except Exception:
        logger.debug(f"{options} cannot be planned", exc_info=True)
        return None
    return Suggestion(dict(options), planned.peak, planned.fits, cost)


def suggestion_lines(found: list[Suggestion]) -> Iterator[str]:
    """Yield the lines of suggestions."""
    if not found:
        yield "No option needs less memory: use more processes and a higher shard degree."
        return
    yield "Options that fit, cheapest first:" if found[0].fits else "No single option fits. These need less memory:"
    width = max(len(it.text) for it in found)
    for it in found:
        peak = f"{it.peak / 2**30:,.1f} GiB" if it.peak >= 2**30 else f"{it.peak / 2**30:.3g} GiB"
        yield f"  {it.text:{width}}  {peak:>10}  {it.cost}"
