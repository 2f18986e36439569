"""Observers of training: named hooks, so that planner, profilers and error messages need no patches of the code."""

import time
from collections.abc import Callable
from enum import StrEnum
from typing import NamedTuple


class Phase(StrEnum):
    """Phase of training. Each has a timeout, and a category of time."""

    START = "start"
    DATA_PREPARATION = "data preparation"
    MODEL = "model"
    SHARDING = "sharding"
    OPTIMIZER = "optimizer"
    CHECKPOINT_LOAD = "checkpoint load"
    DATA = "data"
    TEACHER = "teacher"
    FORWARD = "forward"
    BACKWARD = "backward"
    UPDATE = "update"
    METRICS = "metrics"
    PROFILING = "profiling"
    """A trace is written: no time of a step."""
    VALIDATION = "validation"
    CHECKPOINT = "checkpoint"
    EXPORT = "export"
    END = "end"

    @property
    def timeout(self) -> str:
        """Beginning of the option of `[comm]` with its timeout: init, validation or save. Or step: that has
        `train_timeout_seconds`, and `init_timeout_seconds` while it may compile."""
        return OUTSIDE_STEPS.get(self, ("step", ""))[0]

    @property
    def category(self) -> str:
        """What its time counts as: one of `metrics.durations.CATEGORIES`."""
        return "data" if self is Phase.DATA else OUTSIDE_STEPS.get(self, ("", "compute"))[1]


OnPhase = Callable[[Phase], None]
"""Is called when a phase begins."""

_INIT, _SAVE = ("init", "start"), ("save", "checkpoint")
OUTSIDE_STEPS = {
    **dict.fromkeys((Phase.START, Phase.DATA_PREPARATION, Phase.MODEL), _INIT),
    **dict.fromkeys((Phase.SHARDING, Phase.OPTIMIZER, Phase.CHECKPOINT_LOAD), _INIT),
    Phase.VALIDATION: ("validation", "validation"),
    **dict.fromkeys((Phase.CHECKPOINT, Phase.EXPORT, Phase.END), _SAVE),
}
"""(timeout, category) of the phases that are no parts of a step."""


class StepObserver:
    """Base class of the observers of training: a subclass overrides the hooks that it needs."""

    reads_weights = True
    """Whether it may read the weights or states of the optimizer, so that training waits for their update."""

    def begin_step(self, step: int) -> None:
        """An optimizer step begins, with the wait for its data."""

    def on_phase(self, phase: Phase) -> None:
        """A phase begins."""

    def close(self) -> None:
        """Training has ended, by itself or by a request."""


class Observers(StepObserver):
    """Several observers, called in their order."""

    def __init__(self, *observers: StepObserver) -> None:
        self._observers = observers

    def begin_step(self, step: int) -> None:
        for observer in self._observers:
            observer.begin_step(step)

    def on_phase(self, phase: Phase) -> None:
        for observer in self._observers:
            observer.on_phase(phase)

    def close(self) -> None:
        for observer in self._observers:
            observer.close()


class Position(NamedTuple):
    """Position of a process in its run."""

    step: int
    """0 before the first step."""
    name: Phase
    since: float
    """Time at which the phase began, by the clock."""

    def __str__(self) -> str:
        return f"step {self.step}, {self.name}" if self.step else self.name


class CurrentPhase(StepObserver):
    """Remembers where training is, for error messages and the watchdog, and the time of each phase.

    `position` is replaced as a whole, so another thread always reads a step with its own phase. A name that is no phase
    is an error.

    Args:
        began: time at which the process began, by the clock.
        compiled_before: seconds that torch.compile had taken by then, for an earlier run in the same process.
    """

    def __init__(
        self, *, began: float | None = None, compiled_before: float = 0.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.compiled_before = compiled_before
        self._clock = clock
        self._spent: dict[Phase, float] = {}
        self.position = Position(0, Phase.START, clock() if began is None else began)

    def begin_step(self, step: int) -> None:
        self._move(step, Phase.DATA)

    def on_phase(self, phase: Phase) -> None:
        self._move(self.position.step, Phase(phase))

    def enter(self, phase: Phase) -> None:
        """Begin a phase."""
        self.on_phase(phase)

    def _move(self, step: int, name: Phase) -> None:
        now, before = self._clock(), self.position
        self._spent[before.name] = self._spent.get(before.name, 0) + now - before.since
        self.position = Position(step, name, now)

    def seconds(self) -> dict[Phase, float]:
        """Return the seconds of each phase since the process began, the present one included."""
        return {**self._spent, self.position.name: self._spent.get(self.position.name, 0) + self.since()}

    def since(self) -> float:
        """Return the seconds of the present phase so far."""
        return self._clock() - self.position.since

    def __str__(self) -> str:
        return str(self.position)
