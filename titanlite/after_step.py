"""What happens after the steps at which it is due: validation, a save, a local copy."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from titanlite.checkpoint.manager import CheckpointManager
from titanlite.checkpoint.manifest import Progress
from titanlite.metrics.recorder import MetricsRecorder
from titanlite.observer import OnPhase, Phase
from titanlite.schedule import is_due
from titanlite.schema import Checkpoint, Validation
from titanlite.state import TrainingState
from titanlite.validation import Validator


@dataclass(frozen=True, kw_only=True)
class EndedStep:
    """An optimizer step that has ended."""

    number: int
    is_last: bool
    """Of the run."""
    progress: Callable[[], Progress]
    """Returns the progress at its end. It may wait for the device."""
    on_phase: OnPhase
    is_stop_asked: Callable[[], bool]
    """Returns whether a signal asks to stop. It is a collective operation."""


class AfterStep(Protocol):
    """A task after some steps. All ranks call its methods together, in the order of the list."""

    def is_due(self, step: int, *, last: bool) -> bool:
        """Return whether it is due after a step. The guard has checked the step when it runs."""
        ...

    def run(self, step: EndedStep) -> None:
        """Do it."""
        ...


@dataclass(frozen=True)
class Validate:
    config: Validation
    validator: Validator
    state: TrainingState
    checkpoints: CheckpointManager
    metrics: MetricsRecorder

    def is_due(self, step: int, *, last: bool) -> bool:
        return self.config.enable and is_due(step, self.config.freq, last=last)

    def run(self, step: EndedStep) -> None:
        def measure() -> dict[str, Any] | None:
            step.on_phase(Phase.VALIDATION)  # each has its whole timeout
            return self.validator.run(self.state.model, stops=None if step.is_last else step.is_stop_asked)

        with self.metrics.not_training(waits_for_device=True), self.checkpoints.not_training():
            if record := measure():
                self.checkpoints.wait_until_staged()  # the average takes the place of the weights
                record |= self.state.average.measured(measure) if self.state.average else {}
                self.metrics.record_validation(step.number, record)


@dataclass(frozen=True)
class Save:
    config: Checkpoint
    checkpoints: CheckpointManager
    metrics: MetricsRecorder

    def is_due(self, step: int, *, last: bool) -> bool:
        return self.config.enable and is_due(step, self.config.interval, last=last)

    def run(self, step: EndedStep) -> None:
        with self.metrics.not_training(waits_for_device=not self.checkpoints.is_background):
            step.on_phase(Phase.CHECKPOINT)
            self.checkpoints.save(step.progress(), last=step.is_last)


@dataclass(frozen=True)
class CopyLocally:
    """Local copies.

    Args:
        is_target: a rollback may return to a copy; see `CheckpointManager.copy`.
    """

    config: Checkpoint
    checkpoints: CheckpointManager
    is_target: bool

    def is_due(self, step: int, *, last: bool) -> bool:
        return self.config.local_interval > 0 and not last and step % self.config.local_interval == 0

    def run(self, step: EndedStep) -> None:
        self.checkpoints.copy(step.progress(), is_target=self.is_target)
