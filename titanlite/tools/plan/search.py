"""Search for the best layout of a config: traced on fake tensors, ranked by predicted tokens a second.

Only a few steps are traced: each recompute mode with each variant of techniques, with one and with two sequences in a
forward pass. Memory and time grow linearly with further sequences. Another layout changes the collectives and the share
of the states that a rank holds, and both are known exactly. The best candidates are then planned in full, and those
that do not fit are dropped.
"""

import multiprocessing
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import torch

from titanlite.config.checks import find_conflicts
from titanlite.models.frozen import FrozenModel
from titanlite.runtime.allocator import cores
from titanlite.runtime.errors import UserError
from titanlite.schema import Config, Degrees
from titanlite.techniques import every_technique, exclusions
from titanlite.techniques.technique import Options
from titanlite.tools.plan.estimate import Layout, Plan, Trace, estimate, model_of, planned_targets, trace, with_options
from titanlite.tools.plan.layouts import (
    CONTEXT,
    EXPERT,
    TENSOR,
    all_degrees,
    can_have,
    can_share_experts,
    further_axes,
    grow,
    lay_out,
    reductions,
)
from titanlite.tools.plan.memory import Profile
from titanlite.tools.plan.schedule import step_time
from titanlite.tools.plan.time import Unit, host_time
from titanlite.tools.plan.trace import prefix_of
from titanlite.tools.plan.workload import Workload

RESHARD, FROZEN = ("default", "never"), ("always", "never")
"""Values of `fsdp_reshard_after_forward`, of the trained model and of a frozen one; the first needs least memory."""
MODES = ("none", "selective", "full")
WORTH = 1.005
"""Least speed-up for which a candidate that needs more memory is listed beside one that needs less."""
LARGEST_BATCH = 16
"""Most sequences in a forward pass that are tried."""
GIB = 2**30

STATES = ("parameters", "gradients", "optimizer")
"""Categories of memory that ranks share."""
Sharding = tuple[Degrees, str, str | None]
"""Degrees, and when gathered parameters of the trained and of the frozen model are freed."""
Traces = dict[tuple[str, str, int], Trace]
"""Traces of full sharding, by (recompute mode, variant, local batch size)."""


@dataclass(frozen=True)
class Candidate:
    """A way to run the config, with its expected memory and time before it is planned in full."""

    options: Options
    mode: str
    batch: int
    variant: str
    """Words for the options of techniques that the search sets: one of their `variants`."""
    last_resort: str
    """Words for the switch that is on because nothing fits without it. Empty: none is."""
    degrees: Degrees
    reshard: str
    frozen: tuple[str, str] | None = None
    """Word for a frozen model beside the one that is trained, and its `fsdp_reshard_after_forward`."""
    tokens_per_second: float = 0.0
    reserved: float = 0.0
    """Bytes."""
    host_of_node: float = 0.0
    """Bytes of host memory in a node."""

    @property
    def kernels(self) -> tuple[Any, ...]:
        """Options that determine the work of the device."""
        return self.mode, self.batch, self.variant, self.last_resort

    @property
    def title(self) -> str:
        words = [f"{self.degrees}", f"reshard {self.reshard}", f"recompute {self.mode}", f"local batch {self.batch}"]
        words += [" ".join(self.frozen)] if self.frozen else []
        return ", ".join([*words, *filter(None, (self.variant, self.last_resort))])


@dataclass(frozen=True)
class Found:
    """Result of a search."""

    best: list[tuple[Candidate, Plan]]
    """Fastest first; all fit."""
    tried: int


def is_no_better(it: Candidate, other: Candidate) -> bool:
    """Return True if a candidate has the same kernels, is not noticeably faster, and needs no less memory."""
    faster = it.tokens_per_second > other.tokens_per_second * WORTH
    return it.kernels == other.kernels and not faster and it.reserved >= other.reserved


def search(config: Config, layout: Layout, *, count: int = 5) -> Found:
    """Search all layouts for the fastest ones that fit.

    Args:
        config: the search sets its layout, recomputation, local batch size, and the variants of techniques.
        count: number of best candidates.

    Raises:
        UserError: nothing fits, or the global batch cannot be split over the processes.
    """
    with ProcessPoolExecutor(cores(), multiprocessing.get_context("spawn"), _begin) as pool:
        return best_axes(config, layout, partial(_search, pool=pool, count=count))


def best_axes(config: Config, layout: Layout, find: Callable[[Config, Layout], Found]) -> Found:
    """Return the fastest result of the config's own axes, and of experts on the ranks of a node.

    If these need a last resort or do not fit, take the fewest ranks for a sequence, or else for a layer, that do not.

    Raises:
        UserError: that of the config's own axes.
    """
    parallelism = config.parallelism
    found: Found | None = None
    failure: UserError | None = None
    fits = False
    axes = further_axes(
        parallelism, layout.world_size, seq_len=config.training.seq_len, gpus_per_node=layout.gpus_per_node
    )
    for options in [{}, *(options for options in axes if can_have(config, options, layout.world_size))]:
        if fits and not {CONTEXT, TENSOR}.isdisjoint(options):
            break
        try:
            further = find(with_options(config, options), layout)
        except UserError as error:
            failure = failure or error
            continue
        fits = fits or not further.best[0][0].last_resort
        tried = further.tried + (found.tried if found else 0)
        if found is None or further.best[0][1].tokens_per_second > found.best[0][1].tokens_per_second:
            found = further
        found = replace(found, tried=tried)
    if found is None:
        assert failure
        raise failure
    return found


def _search(config: Config, layout: Layout, *, pool: ProcessPoolExecutor, count: int) -> Found:
    """Search with the config's degrees of further axes."""
    parallelism = config.parallelism
    readers = layout.world_size // (parallelism.context_parallel_degree * parallelism.tensor_parallel_degree)
    share, rest = divmod(config.training.global_batch_size, readers)
    if rest or not share:
        raise UserError(
            f"training.global_batch_size: {config.training.global_batch_size} sequences cannot be split over "
            f"{readers} processes: set a multiple with --training.global_batch_size"
        )
    return _Search(config, layout, pool, share).run(count)


def variants_of(config: Config, layout: Layout) -> dict[str, Options]:
    """Return the options of each combination of the variants that techniques offer, by its words for the table."""
    offered = [it.variants(config, model_of(config), layout.hardware) for it in every_technique()]
    chosen = {
        ", ".join(words for words, _ in variant if words): {key: it for _, some in variant for key, it in some.items()}
        for variant in product(*filter(None, offered))
    }
    return {words: it for words, it in chosen.items() if not any(exclusions(with_options(config, it)))}


def _begin() -> None:
    torch.set_num_threads(1)


class _Search:
    def __init__(self, config: Config, layout: Layout, pool: ProcessPoolExecutor, share: int) -> None:
        self.config = config
        self.layout = layout
        self.pool = pool
        self.share = share
        parallelism = config.parallelism
        world, tensor = layout.world_size, parallelism.tensor_parallel_degree
        every = all_degrees(world, parallelism.context_parallel_degree, tensor)
        self.degrees = [it for it in every if can_share_experts(config, it.sharded)]
        self.full = self.degrees[-1].sharded
        """Ranks that share parameters in the layout that is traced, from which the others are derived."""
        self.experts = parallelism.expert_parallel_degree
        self.reduce_once = config.parallelism.fsdp_reduce_gradients == "last"
        sizes = range(1, min(share, LARGEST_BATCH) + 1)
        self.batches = [size for size in sizes if share % size == 0 and not self._is_refused(size)]
        self.frozen = planned_targets(config, vocab_size=model_of(config).args.vocab_size).frozen
        self.policies = FROZEN if self.frozen else (None,)
        self.variants = variants_of(config, layout)
        resorts = ((it, *it.last_resort) for it in every_technique() if it.last_resort)
        self.resort, self.resort_words, self.resort_switch = next(resorts)

    def _is_refused(self, batch: int) -> bool:
        """Return whether the config, on any layout, cannot have a local batch size."""
        key = "training.local_batch_size"
        return any(found == key for found, _ in find_conflicts(with_options(self.config, {key: batch}), None, ()))

    def run(self, count: int) -> Found:
        traces = self._trace_all()
        candidates = [self._expect(it, traces) for it in self._candidates()]
        room = self.layout.usable
        if not any(it.reserved <= room for it in candidates):
            candidates += [self._expect(it, traces) for it in self._candidates(last_resort=True)]
        candidates.sort(key=lambda it: (-it.tokens_per_second, it.reserved))
        found = self._confirm(candidates, room, count)
        if not found.best:
            raise UserError(self._nothing_fits(candidates, room))
        return found

    def _nothing_fits(self, candidates: Sequence[Candidate], room: float) -> str:
        hardware = self.layout.hardware
        least = min((it for it in candidates if not it.last_resort), key=lambda it: it.reserved)
        hosts = [it.host_of_node for it in candidates if it.last_resort and it.reserved <= room]
        resort = (
            f"; {self.resort_words} needs {min(hosts) / GIB:,.0f} GiB of host memory in a node, which has "
            f"{hardware.node_memory / GIB:,.0f}"
            if hosts
            else ""
        )
        return (
            f"nothing fits: the least is {least.reserved / GIB:.1f} GiB ({least.title}), and a {hardware.name} has "
            f"{room / GIB:.1f} GiB for it{resort}. Use more GPUs, or a shorter training.seq_len"
        )

    def _trace_all(self) -> Traces:
        keys = list(product(MODES, self.variants, self.batches[:2]))
        futures = {}
        for mode, variant, batch in keys:
            sharding = self.degrees[-1], RESHARD[0], self.policies[0]
            options = self._options(mode, variant, batch, sharding)
            futures[mode, variant, batch] = self._submit(with_options(self.config, options))
        return {key: future.result() for key, future in futures.items()}

    def _options(self, mode: str, variant: str, batch: int, sharding: Sharding, last_resort: bool = False) -> Options:
        degrees, reshard, of_frozen = sharding
        return {
            **({f"{self.frozen.section}.fsdp_reshard_after_forward": of_frozen} if self.frozen else {}),
            "parallelism.data_parallel_replicate_degree": degrees.replicate,
            "parallelism.data_parallel_shard_degree": degrees.shard,
            CONTEXT: degrees.context,
            **({EXPERT: self.experts} if self.experts > 1 else {}),
            **({TENSOR: degrees.tensor} if degrees.tensor > 1 else {}),
            "parallelism.fsdp_reshard_after_forward": reshard,
            "activation_checkpoint.mode": mode,
            "activation_checkpoint.selective_ac_option": "op",
            "training.local_batch_size": batch,
            self.resort_switch: last_resort,
            **self.variants[variant],
        }

    def _candidates(self, *, last_resort: bool = False) -> Iterator[Candidate]:
        words = self.resort_words if last_resort else ""
        for degrees, mode, variant, batch in product(self.degrees, MODES, self.variants, self.batches):
            several = degrees.sharded > 1
            for reshard, policy in product(RESHARD if several else RESHARD[:1], self.policies[: 1 + several]):
                options = self._options(mode, variant, batch, (degrees, reshard, policy), last_resort)
                frozen = (self.frozen.section, policy) if self.frozen and policy else None
                yield Candidate(options, mode, batch, variant, words, degrees, reshard, frozen)

    def _expect(self, it: Candidate, traces: Traces) -> Candidate:
        """Return the candidate with its expected memory and time."""
        one = traces[it.mode, it.variant, self.batches[0]]
        two = traces[it.mode, it.variant, self.batches[:2][-1]]
        world, hardware, per_node = self.layout.world_size, self.layout.hardware, self.layout.gpus_per_node
        full = self.full
        further = (it.batch - self.batches[0]) / max(1, self.batches[:2][-1] - self.batches[0])
        without, grown = (
            trace.profile.reserved - self._held_gradients(trace, batch)
            for trace, batch in ((one, self.batches[0]), (two, self.batches[:2][-1]))
        )
        reserved = without + further * (grown - without) + self._held_gradients(one, it.batch)
        states = sum(one.profile.most(category) for category in STATES)
        host = states * full / it.degrees.sharded if it.last_resort else 0.0
        gathered = sum(it.bytes for unit in one.workload.units for it in unit.gather if not is_of(self.frozen, unit))
        policy = it.frozen[1] if it.frozen else None
        reserved += kept_bytes(self.frozen, one.profile, one.workload, policy, shard=it.degrees.sharded, world=full)
        reserved += -states if it.last_resort else states * (full / it.degrees.sharded - 1)
        if world > 1 and (it.reshard == "never" or it.degrees.sharded == 1):
            reserved += gathered
        units = [
            lay_out(
                grow(of_one, of_two, further, hardware),
                it.degrees,
                full=full,
                reshard=it.reshard,
                reduce_once=self.reduce_once,
                gpus_per_node=per_node,
                stays_gathered=policy == "never" and is_of(self.frozen, of_one),
            )
            for of_one, of_two in zip(one.workload.units, two.workload.units, strict=True)
        ]
        update = [kernel._replace(bytes=kernel.bytes * full // it.degrees.sharded) for kernel in one.workload.update]
        time = step_time(
            units,
            update=update,
            hardware=hardware,
            gpus_per_node=per_node,
            accumulation=self.share // it.batch,
            whole=one.workload.whole,
        )
        total = time.total
        if it.last_resort:
            sizes = {category: one.profile.most(category) * full / it.degrees.sharded for category in STATES}
            resorted = with_options(self.config, {self.resort_switch: True})
            total += host_time([self.resort], resorted, sizes, self.share // it.batch)
        tokens = self.config.training.global_batch_size * self.config.training.seq_len
        return replace(
            it,
            tokens_per_second=tokens / total,
            reserved=reserved,
            host_of_node=host * min(world, per_node),
        )

    def _held_gradients(self, traced: Trace, batch: int) -> int:
        """Bytes of whole gradients that a rank holds from one micro-batch to the next."""
        if not self.reduce_once or batch == self.share:
            return 0
        return sum(it.bytes for unit in traced.workload.units for it in reductions(unit))

    def _confirm(self, candidates: Sequence[Candidate], room: float, count: int) -> Found:
        """Plan the best candidates in full."""
        best: list[tuple[Candidate, Plan]] = []
        most_of_node = self.layout.hardware.node_memory
        rest = deque(it for it in candidates if it.reserved <= 1.05 * room and it.host_of_node <= most_of_node)
        while rest and len(best) < count:
            chosen: list[Candidate] = []
            while rest and len(best) + len(chosen) < count:
                it = rest.popleft()
                if not any(is_no_better(it, other) for other in (*(one for one, _ in best), *chosen)):
                    chosen.append(it)
            best += [pair for pair in zip(chosen, self._plan(chosen), strict=True) if pair[1].fits]
        best.sort(key=lambda pair: -pair[1].tokens_per_second)
        return Found(best, len(candidates))

    def _plan(self, chosen: Sequence[Candidate]) -> list[Plan]:
        """Plan the candidates side by side, each from a trace of the whole model."""
        configs = [with_options(self.config, it.options) for it in chosen]
        futures = [self._submit(config, whole=True) for config in configs]
        return [estimate(it.result(), config, self.layout) for it, config in zip(futures, configs, strict=True)]

    def _submit(self, config: Config, *, whole: bool = False) -> Future[Trace]:
        return self.pool.submit(trace, config, self.layout, whole=whole)


# A frozen model beside the one that is trained


def is_of(frozen: FrozenModel | None, unit: Unit) -> bool:
    """Return whether an FSDP unit is one of the frozen model."""
    return frozen is not None and unit.name.startswith(prefix_of(frozen))


def kept_bytes(
    frozen: FrozenModel | None, profile: Profile, workload: Workload, reshard: str | None, *, shard: int, world: int
) -> float:
    """Return the bytes that another layout keeps of the frozen model, beyond those of full sharding.

    Args:
        profile: of full sharding over `world` ranks; the model frees what it gathers.
        reshard: its `fsdp_reshard_after_forward` in the other layout.
        shard: shard degree of that layout.
    """
    if frozen is None:
        return 0.0
    more = profile.most(frozen.section) * (world / shard - 1)
    if reshard != "never" or shard == 1:
        return more
    return more + sum(
        max((it.bytes for it in unit.gather), default=0) for unit in workload.units if is_of(frozen, unit)
    )
