"""The way back over a spike, in the processes that train: to the newest checkpoint, and past the samples after it."""

import gc
import logging
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from titanlite.checkpoint.manifest import Progress
from titanlite.data.samples import Samples
from titanlite.guard import Rollback, SpikeFound
from titanlite.observer import Observers, Phase

if TYPE_CHECKING:
    from titanlite.train import Run

logger = logging.getLogger(__name__)


def go_back(run: "Run", spike: SpikeFound) -> None:
    """Return to the newest checkpoint, which is from before the spike, and continue with the samples after its step.

    All is as in a start that resumes there, with the window and the counts of the checkpoint. The decision is among the
    records of skipped steps, where each start finds it. One that is lost is made again, because training comes to the
    same spike.
    """
    config, last = run.config, spike.skipped[-1]
    gc.unfreeze()
    run.batches.close()
    Observers(*run.observers).close()
    run.phase.phase(Phase.CHECKPOINT_LOAD)
    loaded = run.checkpoints.go_back()
    loaded = replace(loaded, samples_seen=run.samples.convert(loaded.samples_seen, loaded.data))
    samples, seq_len = run.samples_at(last.step), config.training.seq_len
    decision = Rollback(loaded.step, loaded.saved_at, samples, run.guard.rollbacks + 1, seq_len)
    run.metrics.record_skipped([*spike.skipped[:-1], replace(last, rollback=decision)], run.micro_batches, run.samples)
    logger.warning(
        f"back to step {loaded.step}, over the spike of step {last.step}: the sequences {loaded.samples_seen:,} to "
        f"{decision.samples - 1:,} are left out (rollback {decision.rollbacks} of {config.guard.max_rollbacks})"
    )
    run.samples = run.samples.resume(loaded.data, loaded.samples_seen, config.data.on_change)
    run.continue_at(after_rollbacks(loaded, [decision], run.samples))


def after_rollbacks(progress: Progress, rollbacks: Iterable[Rollback], samples: Samples) -> Progress:
    """Return the progress with which a run continues at a checkpoint: that of the last rollback to it, if any."""
    for last in rollbacks:
        if (last.checkpoint, last.saved_at) == (progress.step, progress.saved_at):
            guard = progress.guard | {"rollbacks": last.rollbacks}
            seen = samples.convert(last.samples, {"seq_len": last.seq_len})
            progress = replace(progress, samples_seen=seen, guard=guard)
    return progress
