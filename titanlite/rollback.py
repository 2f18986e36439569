"""Rollbacks over spikes: the progress with which a run continues at a checkpoint to which it has gone back."""

from collections.abc import Iterable
from dataclasses import replace

from titanlite.checkpoint.manifest import Progress
from titanlite.data.samples import Samples
from titanlite.guard import Rollback


def after_rollbacks(progress: Progress, rollbacks: Iterable[Rollback], samples: Samples) -> Progress:
    """Return the progress with which a run continues at a checkpoint: that of the last rollback to it, if any."""
    for last in rollbacks:
        if (last.checkpoint, last.saved_at) == (progress.step, progress.saved_at):
            guard = progress.guard | {"rollbacks": last.rollbacks}
            seen = samples.convert(last.samples, {"seq_len": last.seq_len})
            progress = replace(progress, samples_seen=seen, guard=guard)
    return progress
