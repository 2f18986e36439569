"""What a step's number decides: the learning rate, and what is due after the step. Pure functions; nothing to save."""

import math
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
        ends = [-(-it.until_tokens // training.seq_len) for it in training.batch_ramp]
        sizes = [it.global_batch_size for it in training.batch_ramp]
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


def learning_rate(step: int, *, peak: float, steps: int, config: LRScheduler) -> float:
    """The rate of optimizer step `step`, counted from 1 to `steps`.

    Warm-up rises linearly and is at the peak in its last step. Decay falls towards min_lr_factor x peak, which it would
    reach one step after the last, so that no step has a rate of zero. The sqrt form is 1 - sqrt(progress)
    (arXiv:2405.18392).
    """
    if step <= config.warmup_steps:
        return peak * step / config.warmup_steps
    after_warmup = max(0, steps - config.warmup_steps)
    decay_steps = config.decay_steps
    if decay_steps is None:
        decay_steps = after_warmup if config.decay_ratio is None else round(steps * config.decay_ratio)
    decay_steps = min(after_warmup, decay_steps)
    progress = max(0, step - (steps - decay_steps)) / (decay_steps + 1)
    match config.decay_type:
        case "linear":
            factor = 1 - progress
        case "cosine":
            factor = (1 + math.cos(math.pi * progress)) / 2
        case "sqrt":
            factor = 1 - math.sqrt(progress)
    return peak * (config.min_lr_factor + (1 - config.min_lr_factor) * factor)
