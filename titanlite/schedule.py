"""What a step's number decides: the learning rate, and what is due after the step. Pure functions; nothing to save."""

import math

from titanlite.runtime.errors import UserError
from titanlite.schema import LRScheduler, Training


def count_steps(training: Training, *, step: int, samples: int, limit: int | None) -> int:
    """Steps of the whole run.

    Args:
        step, samples: that are done.
        limit: samples that the data has in `training.epochs`; None where that is not set.

    Raises:
        UserError: the data has too few for one step.
    """
    batch = training.global_batch_size
    if training.tokens is not None:
        left = max(0, training.tokens - samples * training.seq_len)
        return step + -(-left // (batch * training.seq_len))
    if limit is None:
        return training.steps
    most = step + (limit - samples) // batch
    if most < 1:
        raise UserError(f"training.epochs: {limit} sequences are less than one batch of {batch}")
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
