"""What a step's number decides: the learning rate, and what is due after the step. Pure functions; nothing to save."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from titanlite.runtime.errors import UserError
from titanlite.schema import LRScheduler, Training


@dataclass(frozen=True)
class BatchSizes:
    """Sequences of each step of a run: a function of the sequences before it."""

    stages: tuple[tuple[int, int], ...]
    """Sequences before which a step of the stage begins, and those of the step. Ascending."""
    last: int
    """Sequences of a step after all stages."""

    @classmethod
    def of(cls, training: Training) -> "BatchSizes":
        ends = [-(-stage.until_tokens // training.seq_len) for stage in training.batch_ramp]
        sizes = [stage.global_batch_size for stage in training.batch_ramp]
        return cls(tuple(zip(ends, sizes, strict=True)), training.global_batch_size)

    def at(self, samples: int) -> int:
        """Return the sequences of the step that begins after `samples` sequences."""
        return next((size for end, size in self.stages if samples < end), self.last)

    def after(self, samples: int, steps: int) -> int:
        """Return the sequences that the run has seen after `steps` further steps."""
        for end, size in self.stages:
            some = min(steps, max(0, -(-(end - samples) // size)))
            samples, steps = samples + some * size, steps - some
        return samples + steps * self.last

    def steps_to(self, limit: int, *, samples: int = 0) -> int:
        """Return the number of steps until the run has seen `limit` sequences or more."""
        found = 0
        for end, size in (*self.stages, (limit, self.last)):
            some = max(0, -(-(min(end, limit) - samples) // size))
            samples, found = samples + some * size, found + some
        return found


@dataclass(frozen=True)
class SequenceLengths:
    """Tokens in the sequences that steps compute: each sample is cut into sequences of the length of its step."""

    stages: tuple[tuple[int, int], ...]
    """First sample after the stage, at which a step begins, and its sequence length. Ascending."""
    last: int
    """Length after all stages."""

    @classmethod
    def of(cls, training: Training, *, samples: int = 0) -> "SequenceLengths":
        """Build from [training].

        Args:
            samples: samples seen when this start begins.
        """
        sizes = BatchSizes.of(training)
        ends = [-(-stage.until_tokens // training.seq_len) for stage in training.seq_len_ramp]
        ends = [sizes.after(samples, sizes.steps_to(end, samples=samples)) for end in ends]
        return cls(tuple(zip(ends, (stage.seq_len for stage in training.seq_len_ramp), strict=True)), training.seq_len)

    def at(self, sample: int) -> int:
        """Return the length of the sequences of which a sample consists."""
        return next((length for end, length in self.stages if sample < end), self.last)

    def mean(self, first: int, end: int, value: Callable[[int], float]) -> float:
        """Return the mean of a function of the length over the samples from `first` to before `end`."""
        total, begin = 0.0, first
        for until, length in (*self.stages, (end, self.last)):
            until = min(max(begin, until), end)
            total, begin = total + (until - begin) * value(length), until
        return total / (end - first)


def known_steps(training: Training) -> int | None:
    """Optimizer steps of a whole run with this config. None: `training.epochs` is set, and the data decides."""
    return None if training.epochs is not None else count_steps(training, step=0, samples=0, limit=None)


def count_steps(training: Training, *, step: int, samples: int, limit: int | None) -> int:
    """Steps of the whole run.

    Args:
        step, samples: that are done.
        limit: samples that the data has in `training.epochs`; None where that is not set.

    Raises:
        UserError: the data has too few for one step.
    """
    sizes = BatchSizes.of(training)
    if training.tokens is not None:
        return step + sizes.steps_to(-(-training.tokens // training.seq_len), samples=samples)
    if limit is None:
        return training.steps
    most = step + sizes.steps_to(limit, samples=samples)
    if sizes.after(samples, most - step) > limit:
        most -= 1
    if most < 1:
        raise UserError(f"training.epochs: {limit} sequences are less than one batch of {sizes.at(0)}")
    return max(most, step)


def is_due(step: int, freq: int, *, last: bool) -> bool:
    """Return whether something that is done every `freq` steps, and after the last, is done after this step."""
    return last or step % freq == 0


def learning_rate(position: int, *, peak: float, end: int, size: int = 1, config: LRScheduler) -> float:
    """The rate of an optimizer step.

    Warm-up rises linearly and is at the peak in its last step. Decay falls towards min_lr_factor x peak, which it would
    reach one step after the last, so that no step has a rate of zero. The sqrt form is 1 - sqrt(progress)
    (arXiv:2405.18392).

    Args:
        position: of the end of the step in the run, in steps, or in tokens if `config.counts_tokens`.
        end: of the run, in the same unit.
        size: of the step, in the same unit.
    """
    by_tokens = config.counts_tokens
    warmup = (config.warmup_tokens or 0) if by_tokens else config.warmup_steps
    if position <= warmup:
        return peak * position / warmup
    after_warmup = max(0, end - warmup)
    decay = config.decay_tokens if by_tokens else config.decay_steps
    if decay is None:
        decay = after_warmup if config.decay_ratio is None else round(end * config.decay_ratio)
    decay = min(after_warmup, decay)
    progress = max(0, position - (end - decay)) / (decay + size)
    match config.decay_type:
        case "linear":
            factor = 1 - progress
        case "cosine":
            factor = (1 + math.cos(math.pi * progress)) / 2
        case "sqrt":
            factor = 1 - math.sqrt(progress)
    return peak * (config.min_lr_factor + (1 - config.min_lr_factor) * factor)
