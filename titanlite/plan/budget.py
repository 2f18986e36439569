"""What each block computes again, so that a step stays within a budget of memory at the least computation.

The plan's own figures decide: three steps on fake tensors, in which all blocks keep everything, or attention and every
other product, or their input only, tell what a block keeps in each case and what computing the rest again takes. Every
mix of the three is added up from them, and the cheapest that fits is rehearsed as a whole before it is taken.

Blocks that compute more again come first. Memory is highest when backward begins: all that was kept is there. The last
block then needs no room to compute anything again, and a block before it finds the room that later ones have left.
"""

import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from math import ceil
from multiprocessing import get_context
from typing import get_args

import numpy as np
import torch

from titanlite.config.schema import ActivationCheckpoint, Config
from titanlite.models.base import Model, ModelArgs
from titanlite.parallelize import RecomputePolicy
from titanlite.plan.estimate import ON_HOST, Trace, model_of, sketch
from titanlite.plan.memory import Profile, block_of
from titanlite.plan.time import Kernel, kernel_time
from titanlite.preflight import ResolvedConfig
from titanlite.runtime.errors import UserError
from titanlite.runtime.hardware import find_hardware

logger = logging.getLogger(__name__)

LEVELS: tuple[RecomputePolicy, ...] = get_args(RecomputePolicy)
MODES = {
    "none": ActivationCheckpoint(mode="none"),
    "op": ActivationCheckpoint(mode="selective", selective_ac_option="op"),
    "full": ActivationCheckpoint(mode="full"),
}
REFERENCE = "H100"
"""Whose times compare arithmetic with memory traffic and launches. One device for all: every rank of every machine must
come to the same choice, and only ratios matter, which are alike on data-centre GPUs."""
TRIES = 4
"""Mixes that are rehearsed. Where blocks are alike, sums of the sketches are exact, and the first fits."""
GIB = 2**30

Counts = tuple[int, int, int]
"""Blocks of each of LEVELS."""


@dataclass(frozen=True)
class Chosen:
    """What blocks compute again. Memory in bytes, of the rank with the largest shards."""

    levels: tuple[RecomputePolicy, ...]
    peak: int
    budget: int
    peak_none: int
    """If all blocks kept everything."""
    peak_full: int
    """If all blocks kept their input only. No choice takes less."""
    recomputed: float
    """Time that is computed again, as a share of forward's, both by the reference's rates."""
    sketch: Trace = field(repr=False)

    def __str__(self) -> str:
        kept = {"none": "everything", "op": "attention and every other product", "full": "their input"}
        counts = [(self.levels.count(level), kept[level]) for level in LEVELS if level in self.levels]
        parts = [f"{count} {'keeps' if count == 1 else 'keep'} {what}" for count, what in counts]
        return (
            f"activation checkpointing within {self.budget / GIB:.4g} GiB: of {len(self.levels)} blocks "
            f"{', '.join(parts)}; predicted peak {self.peak / GIB:.4g} GiB, {self.recomputed:.0%} of forward is "
            "computed again"
        )


def with_levels(config: Config, resolved: ResolvedConfig, *, world_size: int, device: torch.device) -> ResolvedConfig:
    """With the choice of `choose_levels`, which is told on the console.

    A process of its own makes it. PyTorch remembers which part of a tensor this rank has, for meshes that look alike,
    and a process that has rehearsed as rank 0 would go on to train with the shards of rank 0.
    """
    with ProcessPoolExecutor(1, get_context("spawn"), _begin) as pool:
        chosen = pool.submit(_choose, config, world_size, device.type == "cuda").result()
    logger.info(str(chosen))
    return replace(resolved, levels=chosen.levels)


def _begin() -> None:
    torch.set_num_threads(1)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


def _choose(config: Config, world_size: int, gpu: bool) -> Chosen:
    return choose_levels(config, *model_of(config), world_size=world_size, gpus_per_node=world_size, gpu=gpu)


def choose_levels(
    config: Config, kind: type[Model], args: ModelArgs, *, world_size: int, gpus_per_node: int, gpu: bool
) -> Chosen:
    """The levels with the least recomputation that fit. The same on every rank; no process group, and no training in
    this process afterwards: see `with_levels`.

    Args:
        config: of mode budget.
        gpus_per_node: ranks in a node. Only the sketch depends on it.
        gpu: as an NVIDIA GPU would do it, else as this machine's CPU.

    Raises:
        UserError: nothing fits.
    """
    gib = config.activation_checkpoint.memory_budget_gib
    assert gib is not None
    budget = int(gib * GIB)
    hidden = ON_HOST if gpu and config.training.enable_cpu_offload else ()
    sketched = partial(sketch, kind=kind, args=args, world_size=world_size, gpus_per_node=gpus_per_node, gpu=gpu)
    uniform: dict[RecomputePolicy, Trace] = {}
    for level in LEVELS:
        uniform[level] = sketched(config.model_copy(update={"activation_checkpoint": MODES[level]}))
    peaks = {level: _peak(it.profile, hidden) for level, it in uniform.items()}
    mixes = _Mixes(uniform, hidden)
    excess = 0  # of rehearsed mixes over what the sketches say of them
    tries = 0
    for counts in mixes.cheapest_first():
        levels = _in_order(counts)
        if len(set(levels)) == 1:
            found = uniform[levels[0]]
        elif tries < TRIES and mixes.peak(levels) + excess <= budget:
            tries += 1
            found = sketched(config, levels=levels)
        else:
            continue
        peak = _peak(found.profile, hidden)
        if peak <= budget:
            return Chosen(levels, peak, budget, peaks["none"], peaks["full"], mixes.recomputed(levels), found)
        excess = max(excess, peak - mixes.peak(levels))
    least = ceil(1000 * min(peaks.values()) / GIB) / 1000
    raise UserError(
        f"activation_checkpoint.memory_budget_gib: {gib:g} GiB is not enough: a step takes at least {least:g} GiB on "
        "each device, where all blocks compute everything again. Use more processes, a higher shard degree, or a "
        "smaller training.local_batch_size"
    )


def _peak(profile: Profile, hidden: Sequence[str]) -> int:
    return max(_bytes(profile, name, hidden) for name in profile.phases)


def _bytes(profile: Profile, phase: str, hidden: Sequence[str]) -> int:
    """At the peak of a phase, but for causes that are not on the device."""
    return sum(size for cause, size in profile.phases[phase].items() if cause not in hidden)


def _in_order(counts: Counts) -> tuple[RecomputePolicy, ...]:
    """Those that compute most again come first."""
    by_level = zip(reversed(LEVELS), reversed(counts), strict=True)
    return tuple(level for level, count in by_level for _ in range(count))


class _Mixes:
    """Peak and cost of blocks that are not all of one level, from sketches of those that are."""

    def __init__(self, sketches: dict[RecomputePolicy, Trace], hidden: Sequence[str]) -> None:
        self.blocks = sketches["none"].profile.blocks
        self._forward = sum(_seconds(unit.forward) for unit in sketches["none"].work.units)
        seconds = {level: _seconds_of_blocks(it) for level, it in sketches.items()}
        self._added = {level: (seconds[level] - seconds["none"]) / self.blocks for level in LEVELS}
        """By a block that computes again. Its forward counts too: a compiled one writes less then."""
        profiles = {level: it.profile for level, it in sketches.items()}
        self._kept = {level: _kept(it, self.blocks) for level, it in profiles.items()}
        places = np.arange(self.blocks)
        self._own = {
            level: _of_blocks(it, places, hidden) - self._kept[level] * places for level, it in profiles.items()
        }
        """At the peak of each block's phases, without what blocks before it keep."""
        others = [name for name in profiles["full"].phases if block_of(name) is None]
        self._others = {
            level: np.array([_bytes(it, name, hidden) for name in others]) for level, it in profiles.items()
        }
        """At the peaks of all other phases."""

    def peak(self, levels: Sequence[RecomputePolicy]) -> int:
        """Bytes. Each block adds to a phase outside of the blocks as much as it does where all are of its level."""
        own = np.choose([LEVELS.index(level) for level in levels], [self._own[level] for level in LEVELS])
        kept = np.cumsum([0.0, *(self._kept[level] for level in levels)])[:-1]
        others = sum(self._others[level] * (levels.count(level) / self.blocks) for level in LEVELS)
        return ceil(max(np.max(own + kept), np.max(others)))

    def recomputed(self, levels: Sequence[RecomputePolicy]) -> float:
        return sum(self._added[level] for level in levels) / self._forward

    def cheapest_first(self) -> Iterator[Counts]:
        """All mixes; of equal ones, that with fewer blocks that compute again comes first."""
        every = [
            (self.blocks - op - full, op, full)
            for full in range(self.blocks + 1)
            for op in range(self.blocks + 1 - full)
        ]
        added = self._added
        yield from sorted(every, key=lambda counts: (counts[1] * added["op"] + counts[2] * added["full"], -counts[0]))


def _seconds_of_blocks(sketched: Trace) -> float:
    units = [unit for unit in sketched.work.units if unit.name.startswith("layers.")]
    return sum(_seconds((*unit.forward, *unit.backward)) for unit in units)


def _seconds(kernels: Iterable[Kernel]) -> float:
    hardware = find_hardware(REFERENCE)
    return sum(kernel_time(kernel, hardware) for kernel in kernels)


def _kept(profile: Profile, blocks: int) -> float:
    """Bytes that a block keeps for backward: so much higher is the peak of the next block's forward. The first block's
    input is the embedding's, and during the last one the head is gathered: neither counts, if there are others."""
    first, last = (1, blocks - 2) if blocks > 3 else (0, min(1, blocks - 1))
    if first == last:
        return 0.0
    low, high = (profile.phases[f"forward layers.{block}"]["activations"] for block in (first, last))
    return (high - low) / (last - first)


def _of_blocks(profile: Profile, places: np.ndarray, hidden: Sequence[str]) -> np.ndarray:
    """Bytes at the peak of each block's phases. Sketches may leave out those between: they lie on a line."""
    highest = np.zeros(len(places))
    for phase in ("forward", "backward", "reduce"):
        known = {
            block: name for name in profile.phases if (block := block_of(name)) is not None and name.startswith(phase)
        }
        sizes = [_bytes(profile, name, hidden) for name in known.values()]
        order = np.argsort([*known])
        highest = np.maximum(highest, np.interp(places, np.array([*known])[order], np.array(sizes)[order]))
    return highest
