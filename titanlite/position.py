"""Where a run is in its steps and its data."""

from collections.abc import Generator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from titanlite.batch import Batch
from titanlite.checkpoint.manifest import Progress
from titanlite.data.loader import MicroBatches
from titanlite.data.samples import Samples
from titanlite.observer import Observers, StepObserver


@dataclass(frozen=True, kw_only=True)
class Position:
    """Where a run begins or, after a rollback, goes on, and what follows from it. A rollback replaces it whole."""

    progress: Progress
    """Of the checkpoint at which the run begins."""
    steps: int
    """Steps of the whole run."""
    samples: Samples
    micro_batches: MicroBatches
    """Which samples each step of this rank takes."""
    batches: Generator[Batch, None, None]
    observers: list[StepObserver]
    """Observers of training that the config asks for."""

    def next_batches(self, step: int) -> list[Batch]:
        """Return this rank's micro-batches of the next step."""
        return list(islice(self.batches, self.micro_batches.count(step)))

    def samples_at(self, step: int) -> int:
        """Return the samples that the run has seen by the end of a step."""
        return self.micro_batches.first_of(step + 1)

    def progress_at(self, step: int, guard: dict[str, Any]) -> Progress:
        """Return the progress at the end of a step.

        Args:
            guard: state of the guard and of the step.
        """
        samples = self.samples_at(step)
        return Progress(step, samples, self.samples.state(samples), guard)

    def close(self) -> None:
        """Close the loader and the observers."""
        self.batches.close()
        Observers(*self.observers).close()
