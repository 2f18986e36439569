"""Suggestions: options that lower the peak memory of a config, each with its predicted peak."""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec

from titanlite.config.checks import find_conflicts
from titanlite.optim.checks import check_optimizer
from titanlite.schema import Config
from titanlite.techniques import every_technique
from titanlite.techniques.technique import Options
from titanlite.tools.plan.estimate import Layout, Plan, model_of, plan, with_options
from titanlite.tools.plan.layouts import data_parallel
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
        texts = {key: str(value).lower() if isinstance(value, bool) else value for key, value in self.options.items()}
        return " ".join(f"--{key}={text}" for key, text in texts.items())


EIGHT_BITS = 2
"""Place of moments in 8 bits among the `suggestions` of techniques."""


def suggest(config: Config, layout: Layout, present: Plan) -> list[Suggestion]:
    """Return options that lower the peak: those that fit first, each group from cheap to expensive.

    Every suggestion is planned in full.

    Args:
        present: the plan of the config as it is.
    """
    found: list[Suggestion] = []
    for group, cost in _candidates(config, layout):
        best, peak = None, present.peak
        for options in group:
            suggestion = _attempt(config, layout, options, cost)
            if suggestion is None or suggestion.peak >= peak:
                break
            best, peak = suggestion, suggestion.peak
            if suggestion.fits:
                break
        found += [best] if best else []
        if sum(suggestion.fits for suggestion in found) == ENOUGH:
            break
    return sorted(found, key=lambda suggestion: not suggestion.fits)


def _candidates(config: Config, layout: Layout) -> Iterator[tuple[list[Options], str]]:
    """Yield (options from the largest memory to the least, cost): the first that fit are suggested, or the last."""
    parallelism, mode = config.parallelism, config.activation_checkpoint.mode
    micro, accumulation = config.training.batch_split(parallelism.degrees(layout.world_size).data_parallel)
    smaller = [size for size in range(micro // 2, 0, -1) if micro * accumulation % size == 0]
    cost = "same results, by more and smaller forward passes"
    yield [{"training.local_batch_size": size} for size in smaller], cost
    if mode == "none":
        yield [{"activation_checkpoint.mode": "selective"}], "recomputes in backward what is cheap"
    if mode != "full":
        yield [{"activation_checkpoint.mode": "full"}], "recomputes forward: about a third more arithmetic"
    if parallelism.fsdp_reshard_after_forward != "always":
        again = "gathers parameters again for backward: more communication"
        yield [{"parallelism.fsdp_reshard_after_forward": "always"}], again
    if parallelism.data_parallel_replicate_degree > 1:
        yield [data_parallel()], "shards over all processes: collectives across nodes"
    if config.optimizer.state_dtype != "bfloat16":
        yield [{"optimizer.state_dtype": "bfloat16"}], "rounds AdamW's moments"
    offered = [own for technique in every_technique() for own in technique.suggestions(config, is_gpu=layout.is_gpu)]
    if config.optimizer.name == "AdamW" and find_spec("torchao"):
        eight = {"optimizer.name": "torchao.optim.AdamW8bit"}
        offered.append((EIGHT_BITS, eight, "rounds AdamW's moments to 8 bits; a compiled update"))
    yield from (([options], cost) for _, options, cost in sorted(offered, key=lambda offer: offer[0]))


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
    width = max(len(suggestion.text) for suggestion in found)
    for suggestion in found:
        yield f"  {suggestion.text:{width}}  {format_size(suggestion.peak):>10}  {suggestion.cost}"
