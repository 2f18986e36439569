"""Suggestions: options that lower the peak memory of a config, each with its predicted peak."""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from itertools import chain

from titanlite.config.checks import find_conflicts
from titanlite.optim.checks import check_optimizer
from titanlite.schema import Config
from titanlite.techniques import every_technique
from titanlite.techniques.technique import Options
from titanlite.tools.plan.estimate import Layout, Plan, model_of, plan, with_options
from titanlite.tools.plan.output import format_size

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
        texts = {key: str(it).lower() if isinstance(it, bool) else it for key, it in self.options.items()}
        return " ".join(f"--{key}={text}" for key, text in texts.items())


EIGHT_BITS = 2
"""Place of moments in 8 bits among the `suggestions` of techniques."""
Attempt = Callable[[Options, str], Suggestion | None]
"""(options, cost) -> the planned suggestion, or None if the config does not accept the options."""


def suggest(config: Config, layout: Layout, present: Plan) -> list[Suggestion]:
    """Return options that lower the peak: those that fit first, each group from cheap to expensive.

    Every suggestion is planned in full.

    Args:
        present: the plan of the config as it is.
    """
    attempt = partial(_attempt, config, layout)
    others = (attempt(options, cost) for options, cost in _candidates(config, layout))
    found: list[Suggestion] = []
    for suggestion in chain([_smaller_batch(config, layout, present, attempt)], others):
        found += [suggestion] if suggestion and suggestion.peak < present.peak else []
        if sum(it.fits for it in found) == ENOUGH:
            break
    return sorted(found, key=lambda it: not it.fits)


def _smaller_batch(config: Config, layout: Layout, present: Plan, attempt: Attempt) -> Suggestion | None:
    """Return half of the local batch, or the largest smaller part that fits, or one sequence."""
    micro, accumulation = config.training.batch_split(config.parallelism.degrees(layout.world_size).data_parallel)
    best, peak = None, present.peak
    for size in range(micro // 2, 0, -1):
        if micro * accumulation % size:
            continue
        suggestion = attempt({"training.local_batch_size": size}, "same results, by more and smaller forward passes")
        if suggestion is None or suggestion.peak >= peak:
            break
        best, peak = suggestion, suggestion.peak
        if suggestion.fits:
            break
    return best


def _candidates(config: Config, layout: Layout) -> Iterator[tuple[Options, str]]:
    """Yield (options, cost) of all options but the local batch size."""
    parallelism, mode = config.parallelism, config.activation_checkpoint.mode
    if mode == "none":
        yield ({"activation_checkpoint.mode": "selective"}, "recomputes in backward what is cheap")
    if mode != "full":
        yield ({"activation_checkpoint.mode": "full"}, "recomputes forward: about a third more arithmetic")
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
        yield f"  {it.text:{width}}  {format_size(it.peak):>10}  {it.cost}"
