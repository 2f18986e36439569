"""Search for the recompute policy of each block: the least recomputation within a memory budget.

Three traces, with all blocks of one policy, give the bytes that a block keeps and the time that recomputation takes.
Every mix of the three policies is added up from these numbers. The cheapest mix that fits is traced, and then chosen.

Blocks that recompute most come first. Memory peaks when backward begins, with all kept activations in place. The last
block then needs no room to recompute, and earlier blocks find the room that later blocks have freed.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from math import ceil
from typing import get_args

import numpy as np

from titanlite.runtime.errors import UserError
from titanlite.runtime.hardware import Hardware
from titanlite.schema import ActivationCheckpoint, Config, RecomputePolicy
from titanlite.tools.plan.estimate import OUTSIDE, Layout, Trace, on_host, trace
from titanlite.tools.plan.memory import Profile, block_of
from titanlite.tools.plan.time import Kernel, kernel_time

POLICIES: tuple[RecomputePolicy, ...] = get_args(RecomputePolicy)
UNIFORM = {
    "none": ActivationCheckpoint(mode="none"),
    "op": ActivationCheckpoint(mode="selective", selective_ac_option="op"),
    "full": ActivationCheckpoint(mode="full"),
}
TRIES = 6
"""Mixes that are traced at most. Where blocks are alike the sums are exact, and the first mix fits. What the allocator
reserves beyond the sum is known of a traced mix only."""
GIB = 2**30

Counts = tuple[int, int, int]
"""Number of blocks of each of POLICIES."""


@dataclass(frozen=True)
class PolicyChoice:
    """Recompute policies within a memory budget. Memory is in bytes, on the rank with the largest shards: on a GPU what
    is reserved and the CUDA context, on a CPU what is allocated."""

    policies: tuple[RecomputePolicy, ...]
    peak: int
    budget: int
    peak_none: int
    """Peak if no block recomputes."""
    peak_full: int
    """Peak if all blocks recompute everything. No choice needs less."""
    recomputed: float
    """Recomputation time as a share of forward."""
    trace: Trace = field(repr=False)

    @property
    def activation_checkpoint(self) -> ActivationCheckpoint:
        return per_block(self.policies)

    def __str__(self) -> str:
        kept = {"none": "everything", "op": "attention and every other matmul", "full": "their input"}
        counts = [(self.policies.count(policy), kept[policy]) for policy in POLICIES if policy in self.policies]
        parts = [f"{count} {'keeps' if count == 1 else 'keep'} {what}" for count, what in counts]
        return (
            f"activation checkpointing within {self.budget / GIB:.4g} GiB: of {len(self.policies)} blocks "
            f"{', '.join(parts)}; predicted {self.peak / GIB:.4g} GiB, recomputation {self.recomputed:.0%} of "
            "forward"
        )


def per_block(policies: Sequence[RecomputePolicy]) -> ActivationCheckpoint:
    """Return the section of the config that sets these policies."""
    runs = [(policy, len([*run])) for policy, run in groupby(policies)]
    return ActivationCheckpoint(mode="per_block", per_block=[f"{policy} x {count}" for policy, count in runs])


def choose_policies(config: Config, layout: Layout, *, budget: int) -> PolicyChoice:
    """Return the policies with the least recomputation whose predicted peak is within the budget.

    Args:
        config: its activation_checkpoint section does not matter.
        budget: bytes of device memory, with the CUDA context.

    Raises:
        UserError: no choice fits.
    """
    hidden = on_host(config) if layout.is_gpu else ()
    uniform: dict[RecomputePolicy, Trace] = {
        policy: trace(config.model_copy(update={"activation_checkpoint": UNIFORM[policy]}), layout)
        for policy in POLICIES
    }

    def needed(traced: Trace) -> int:
        return traced.profile.reserved + OUTSIDE if layout.is_gpu else _peak(traced.profile, hidden)

    peaks = {policy: needed(it) for policy, it in uniform.items()}
    mixes = _Mixes(uniform, hidden, layout.hardware)
    beyond = dict.fromkeys(POLICIES, 0)
    if layout.is_gpu:
        beyond = {policy: peaks[policy] - mixes.peak((policy,) * mixes.blocks) for policy in POLICIES}

    def expected(policies: tuple[RecomputePolicy, ...]) -> float:
        """Sum of tensors, and the share of each policy in what uniform traces need beyond theirs."""
        return mixes.peak(policies) + sum(beyond[policy] for policy in policies) / mixes.blocks

    excess = 0.0  # of traced mixes over the expected
    tries = 0
    for counts in mixes.cheapest_first():
        policies = _in_order(counts)
        if len(set(policies)) == 1:
            found = uniform[policies[0]]
        elif tries < TRIES and expected(policies) + excess <= budget:
            tries += 1
            found = trace(config.model_copy(update={"activation_checkpoint": per_block(policies)}), layout)
        else:
            continue
        peak = needed(found)
        if peak <= budget:
            recomputed = mixes.recomputed(policies)
            return PolicyChoice(policies, peak, budget, peaks["none"], peaks["full"], recomputed, found)
        excess = max(excess, peak - expected(policies))
    least = ceil(1000 * min(peaks.values()) / GIB) / 1000
    raise UserError(
        f"--memory-budget-gib: {budget / GIB:g} GiB is not enough: a step needs at least {least:g} GiB on each device, "
        "where all blocks recompute everything. Use more processes, a higher shard degree, or a smaller "
        "training.local_batch_size"
    )


def _peak(profile: Profile, hidden: Sequence[str]) -> int:
    return max(_bytes(profile, name, hidden) for name in profile.phases)


def _bytes(profile: Profile, phase: str, hidden: Sequence[str]) -> int:
    """Bytes on the device at the peak of a phase.

    Args:
        hidden: categories that are not on the device.
    """
    return sum(size for category, size in profile.phases[phase].items() if category not in hidden)


def _in_order(counts: Counts) -> tuple[RecomputePolicy, ...]:
    """Return one policy for each block: those that recompute most come first."""
    by_policy = zip(reversed(POLICIES), reversed(counts), strict=True)
    return tuple(policy for policy, count in by_policy for _ in range(count))


class _Mixes:
    """Peak and cost of mixed policies, from traces of uniform ones."""

    def __init__(self, traces: dict[RecomputePolicy, Trace], hidden: Sequence[str], hardware: Hardware) -> None:
        self.blocks = traces["none"].profile.blocks
        self._forward = _seconds(
            (kernel for unit in traces["none"].workload.units for kernel in unit.forward), hardware
        )
        seconds = {policy: _seconds(_kernels_of_blocks(it), hardware) for policy, it in traces.items()}
        self._added = {policy: (seconds[policy] - seconds["none"]) / self.blocks for policy in POLICIES}
        """Seconds that one block adds. Its forward counts too: a compiled block writes less if it recomputes."""
        profiles = {policy: it.profile for policy, it in traces.items()}
        self._kept = {policy: _kept(it, self.blocks) for policy, it in profiles.items()}
        places = np.arange(self.blocks)
        self._own = {
            policy: _at_blocks(it, places, hidden) - self._kept[policy] * places for policy, it in profiles.items()
        }
        """Bytes at the peak of each block's phases, without the activations that earlier blocks keep."""
        others = [name for name in profiles["full"].phases if block_of(name) is None]
        self._others = {
            policy: np.array([_bytes(it, name, hidden) for name in others]) for policy, it in profiles.items()
        }
        """Bytes at the peaks of all other phases."""

    def peak(self, policies: Sequence[RecomputePolicy]) -> int:
        """Return the bytes. Each block adds to the phases outside the blocks its share of a uniform policy's peak."""
        own = np.choose([POLICIES.index(policy) for policy in policies], [self._own[policy] for policy in POLICIES])
        kept = np.cumsum([0.0, *(self._kept[policy] for policy in policies)])[:-1]
        others = sum(self._others[policy] * (policies.count(policy) / self.blocks) for policy in POLICIES)
        return ceil(max(np.max(own + kept), np.max(others)))

    def recomputed(self, policies: Sequence[RecomputePolicy]) -> float:
        return sum(self._added[policy] for policy in policies) / self._forward

    def cheapest_first(self) -> Iterator[Counts]:
        """Yield all mixes. Of equal ones, the mix with fewer recomputing blocks comes first."""
        every = [
            (self.blocks - op - full, op, full)
            for full in range(self.blocks + 1)
            for op in range(self.blocks + 1 - full)
        ]
        added = self._added
        yield from sorted(every, key=lambda counts: (counts[1] * added["op"] + counts[2] * added["full"], -counts[0]))


def _kernels_of_blocks(traced: Trace) -> Iterator[Kernel]:
    for unit in traced.workload.units:
        if unit.name.startswith("layers."):
            yield from (*unit.forward, *unit.backward)


def _seconds(kernels: Iterable[Kernel], hardware: Hardware) -> float:
    return sum(kernel_time(kernel, hardware) for kernel in kernels)


def _kept(profile: Profile, blocks: int) -> float:
    """Bytes that a block keeps for backward: the rise of the forward peak from one block to the next.

    The first block's input is the embedding's, and the head is gathered during the last one. Neither counts, if there
    are others.
    """
    first, last = (1, blocks - 2) if blocks > 3 else (0, min(1, blocks - 1))
    if first == last:
        return 0.0
    low, high = (profile.phases[f"forward layers.{block}"]["activations"] for block in (first, last))
    return (high - low) / (last - first)


def _at_blocks(profile: Profile, places: np.ndarray, hidden: Sequence[str]) -> np.ndarray:
    """Bytes at the peak of each block's phases. Blocks that a trace leaves out are interpolated linearly."""
    highest = np.zeros(len(places))
    for phase in ("forward", "backward", "reduce"):
        known = {
            block: name for name in profile.phases if (block := block_of(name)) is not None and name.startswith(phase)
        }
        sizes = [_bytes(profile, name, hidden) for name in known.values()]
        order = np.argsort([*known])
        highest = np.maximum(highest, np.interp(places, np.array([*known])[order], np.array(sizes)[order]))
    return highest
