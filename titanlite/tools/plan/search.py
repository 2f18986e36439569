"""Search for the best layout of a config: traced on fake tensors, ranked by predicted tokens a second.

Each recompute mode with each variant of techniques and each local batch size is traced with full sharding. Another
layout changes the collectives and the share of the states that a rank holds, and both are known exactly. The best
candidates are then planned in full, and those that do not fit are dropped.
"""

import multiprocessing
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, product, repeat

import torch

from titanlite.config.checks import find_conflicts
from titanlite.runtime.allocator import cores
from titanlite.runtime.errors import UserError
from titanlite.schema import Config, Degrees
from titanlite.techniques import every_technique, exclusions
from titanlite.techniques.technique import Options
from titanlite.tools.plan.estimate import (
    Layout,
    Plan,
    Trace,
    estimate,
    model_of,
    plan,
    trace,
    with_options,
)
from titanlite.tools.plan.layouts import (
    CONTEXT,
    EXPERT,
    PIPELINE,
    TENSOR,
    all_degrees,
    can_have,
    data_parallel,
    further_axes,
    lay_out,
    pipelines,
)

RESHARD = ("default", "never")
"""Values of `fsdp_reshard_after_forward`; the first needs least memory."""
MODES = ("none", "selective", "full")
WORTH = 1.005
"""Least speed-up for which a candidate that needs more memory is listed beside one that needs less."""
WORTH_A_PIPELINE = 0.15
"""Least share of a step that waits for collectives for which pipelines are tried."""
LAST_RESORT = "training.enable_cpu_offload"
"""Option that is set only if nothing fits without it."""

LARGEST_BATCH = 16
"""Most sequences in a forward pass that are tried."""
GIB = 2**30

Work = tuple[str, str, int]
"""What determines the work of the device: recompute mode, words for the options of techniques, local batch size."""


@dataclass(frozen=True)
class Candidate:
    """A way to run the config, with the plan that is expected of it."""

    options: Options
    work: Work
    expected: Plan

    @property
    def title(self) -> str:
        mode, variant, batch = self.work
        schedule = self.options.get("parallelism.pipeline_parallel_schedule", "")
        reshard = f"reshard {self.options['parallelism.fsdp_reshard_after_forward']}"
        words = str(self.expected.degrees), schedule, reshard, f"recompute {mode}", f"local batch {batch}", variant
        return ", ".join(filter(None, map(str, words)))


@dataclass(frozen=True)
class Found:
    """Result of a search."""

    best: list[tuple[Candidate, Plan]]
    """Fastest first; all fit."""
    tried: int
    is_last_resort: bool = False
    """Nothing fits without the option that is the last resort."""
    failure: UserError | None = None
    """Reason why the config's own axes do not fit."""


def search(config: Config, layout: Layout, *, count: int = 5) -> Found:
    """Search all layouts for the fastest ones that fit.

    Args:
        config: the search sets its layout, recomputation, local batch size, and the variants of techniques.
        count: number of best candidates.

    Raises:
        UserError: nothing fits, or the global batch cannot be split over the processes.
    """
    spawn = multiprocessing.get_context("spawn")
    without = with_options(config, {PIPELINE: 1})
    with ProcessPoolExecutor(cores(), spawn, torch.set_num_threads, (1,)) as pool:
        found = best_axes(without, layout, partial(_search, pool=pool, count=count))
        time = found.best[0][1].time if found.best else None
        if time is None or found.is_last_resort or time.exposed > WORTH_A_PIPELINE * time.total:
            found = add_pipelines(found, without, layout, pool)
    if not found.best and found.failure:
        raise found.failure
    return replace(found, best=found.best[:count])


def add_pipelines(found: Found, config: Config, layout: Layout, pool: ProcessPoolExecutor) -> Found:
    """Return the result of a search with the pipelines that fit among the best. All are planned in full.

    Without a layout that fits, pipelines recompute all.
    """
    own = found.best[0][0].options if found.best else {"activation_checkpoint.mode": "full"}
    work = own["activation_checkpoint.mode"], "", 1
    tried = [*pipelines(config, layout, own)]
    plans = [*pool.map(plan, (with_options(config, options) for options in tried), repeat(layout))]
    fitting = [(Candidate(options, work, plan), plan) for options, plan in zip(tried, plans, strict=True) if plan.fits]
    kept = [] if found.is_last_resort and fitting else found.best
    best = sorted([*kept, *fitting], key=lambda pair: -pair[1].tokens_per_second)
    return replace(
        found, best=best, tried=found.tried + len(tried), is_last_resort=found.is_last_resort and not fitting
    )


def best_axes(config: Config, layout: Layout, find: Callable[[Config, Layout], Found]) -> Found:
    """Return the fastest result of the config's own axes, and of experts on the ranks of a node.

    If these need a last resort or do not fit, take the fewest ranks for a sequence, or else for a layer, that do not.
    """
    found = Found([], 0)
    for options in chain([Options()], further_axes(config, layout)):
        if found.best and not found.is_last_resort and max(options.get(CONTEXT, 1), options.get(TENSOR, 1)) > 1:
            break
        try:
            further = find(with_options(config, options), layout)
        except UserError as error:
            found = replace(found, failure=found.failure or error)
            continue
        those = [result for result in (found, further) if result.best]
        better = max(those, key=lambda result: (not result.is_last_resort, result.best[0][1].tokens_per_second))
        found = replace(better, tried=found.tried + further.tried, failure=found.failure)
    return found


def _search(config: Config, layout: Layout, *, pool: ProcessPoolExecutor, count: int) -> Found:
    """Search with the config's degrees of further axes, and with the last resort where nothing fits without."""
    parallelism = config.parallelism
    readers = layout.world_size // (parallelism.context_parallel_degree * parallelism.tensor_parallel_degree)
    share, rest = divmod(config.training.global_batch_size, readers)
    if rest or not share:
        raise UserError(
            f"training.global_batch_size: {config.training.global_batch_size} sequences cannot be split over "
            f"{readers} processes: set a multiple with --training.global_batch_size"
        )
    searching = Layouts(config, layout, share)
    traces = [*pool.map(trace, map(searching.traced_config, searching.work), repeat(layout))]
    tried: list[list[Candidate]] = []
    for last_resort in (False, True):
        expected = map(partial(searching.expect, last_resort=last_resort), searching.work, traces)
        tried.append([*chain.from_iterable(expected)])
        if best := _confirm(tried[-1], config, layout, pool, count):
            return Found(best, sum(map(len, tried)), last_resort)
    raise UserError(nothing_fits(tried[0], tried[1], layout))


def variants_of(config: Config, layout: Layout) -> dict[str, Options]:
    """Return the options of each combination of the variants that techniques offer, by its words for the table."""
    offered = [technique.variants(config, model_of(config), layout.hardware) for technique in every_technique()]
    chosen = {
        ", ".join(words for words, _ in variant if words): {key: v for _, some in variant for key, v in some.items()}
        for variant in product(*filter(None, offered))
    }
    return {words: options for words, options in chosen.items() if not any(exclusions(with_options(config, options)))}


class Layouts:
    """All ways to run a config on some processes, but for further axes.

    Args:
        share: sequences of a rank in a step.
    """

    def __init__(self, config: Config, layout: Layout, share: int) -> None:
        self.config = config
        self.layout = layout
        parallelism = config.parallelism
        every = all_degrees(layout.world_size, parallelism.context_parallel_degree, parallelism.tensor_parallel_degree)
        has_experts = parallelism.expert_parallel_degree > 1  # experts do not divide among each number of ranks
        self.degrees = [d for d in every if not has_experts or can_have(config, {}, layout.world_size, d.replicate)]
        sizes = range(1, min(share, LARGEST_BATCH) + 1)
        self.batches = [size for size in sizes if share % size == 0 and not self._is_refused(size)]
        self.frozen = "teacher" if config.teacher.path else None
        self.variants = variants_of(config, layout)
        self.work: list[Work] = list(product(MODES, self.variants, self.batches))

    def _is_refused(self, batch: int) -> bool:
        """Return whether the config, on any layout, cannot have a local batch size."""
        key = "training.local_batch_size"
        return any(found == key for found, _ in find_conflicts(with_options(self.config, {key: batch}), None, ()))

    def traced_config(self, work: Work) -> Config:
        """Return the config with full sharding, from whose trace those of other layouts follow."""
        return with_options(self.config, self._options(work, self.degrees[-1], RESHARD[0]))

    def expect(self, work: Work, traced: Trace, *, last_resort: bool = False) -> Iterator[Candidate]:
        """Yield the candidates with this work.

        Args:
            traced: of `traced_config`.
            last_resort: whether the option that is the last resort is set.
        """
        mode, variant, batch = work
        words = ", ".join(filter(None, (variant, "CPU offload" * last_resort)))
        before = self.traced_config(work)
        for degrees, reshard in product(self.degrees, RESHARD):
            if degrees.sharded == 1 and reshard != RESHARD[0]:
                continue  # parameters are not sharded, so resharding changes nothing
            options = {**self._options(work, degrees, reshard), LAST_RESORT: last_resort}
            config, found = with_options(self.config, options), traced
            if config != before:
                found = lay_out(traced, before, config, self.layout, full=self.degrees[-1].sharded, frozen=self.frozen)
            yield Candidate(options, (mode, words, batch), estimate(found, config, self.layout))

    def _options(self, work: Work, degrees: Degrees, reshard: str) -> Options:
        mode, variant, batch = work
        experts = self.config.parallelism.expert_parallel_degree
        return {
            **data_parallel(degrees.replicate, degrees.shard),
            CONTEXT: degrees.context,
            **({EXPERT: experts} if experts > 1 else {}),
            **({TENSOR: degrees.tensor} if degrees.tensor > 1 else {}),
            "parallelism.fsdp_reshard_after_forward": reshard,
            "activation_checkpoint.mode": mode,
            "activation_checkpoint.selective_ac_option": "op",
            "training.local_batch_size": batch,
            LAST_RESORT: False,
            **self.variants[variant],
        }


def _confirm(
    candidates: Sequence[Candidate], config: Config, layout: Layout, pool: ProcessPoolExecutor, count: int
) -> list[tuple[Candidate, Plan]]:
    """Plan the best candidates in full, side by side, and return those that fit, the fastest first."""
    best: list[tuple[Candidate, Plan]] = []
    ordered = sorted(candidates, key=lambda c: (-c.expected.tokens_per_second, c.expected.reserved))
    rest = deque(candidate for candidate in ordered if may_fit(candidate.expected, layout))
    while rest and len(best) < count:
        chosen: list[Candidate] = []
        while rest and len(best) + len(chosen) < count:
            candidate = rest.popleft()
            if not any(is_no_better(candidate, other) for other in (*(one for one, _ in best), *chosen)):
                chosen.append(candidate)
        configs = [with_options(config, candidate.options) for candidate in chosen]
        traces = pool.map(partial(trace), configs, repeat(layout))
        plans = map(estimate, traces, configs, repeat(layout))
        best += [pair for pair in zip(chosen, plans, strict=True) if pair[1].fits]
    return sorted(best, key=lambda pair: -pair[1].tokens_per_second)


def is_no_better(candidate: Candidate, other: Candidate) -> bool:
    """Return True if a candidate has the same work, is not noticeably faster, and needs no less memory."""
    faster = candidate.expected.tokens_per_second > other.expected.tokens_per_second * WORTH
    return candidate.work == other.work and not faster and candidate.expected.reserved >= other.expected.reserved


def may_fit(expected: Plan, layout: Layout) -> bool:
    """Return whether a plan in full could fit: reserved memory is expected to a few percent."""
    return expected.reserved <= 1.05 * layout.usable and expected.host_of_node <= layout.hardware.node_memory


def nothing_fits(candidates: Sequence[Candidate], last_resort: Sequence[Candidate], layout: Layout) -> str:
    """Return the error: the least memory that the config needs, and the host memory that the last resort needs."""
    least = min(candidates, key=lambda candidate: candidate.expected.reserved)
    on_host = [candidate for candidate in last_resort if candidate.expected.reserved <= layout.usable]
    resort = ""
    if on_host:
        of_node = min(candidate.expected.host_of_node for candidate in on_host)
        resort = (
            f"; {on_host[0].work[1]} needs {of_node / GIB:,.0f} GiB of host memory in a node, which has "
            f"{layout.hardware.node_memory / GIB:,.0f}"
        )
    return (
        f"nothing fits: the least is {least.expected.reserved / GIB:.1f} GiB ({least.title}), and a "
        f"{layout.hardware.name} has {layout.usable / GIB:.1f} GiB for it{resort}. Use more GPUs, or a shorter "
        "training.seq_len"
    )
