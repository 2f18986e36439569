"""Timeouts of collectives: how long a rank waits for the others, which depends on what training does."""

import time
from collections import deque
from collections.abc import Callable

import torch.distributed as dist

from titanlite.config.schema import Comm
from titanlite.observer import CurrentPhase
from titanlite.runtime.private_torch.process_groups import set_timeouts

STARTING_STEPS = 2
"""Steps of a start that may compile, and so have a timeout of their own."""

OPTIONS = {
    "data preparation": "init_timeout_seconds",
    "model": "init_timeout_seconds",
    "checkpoint load": "init_timeout_seconds",
    "validation": "validation_timeout_seconds",
    "checkpoint": "save_timeout_seconds",
    "export": "save_timeout_seconds",
    "end": "save_timeout_seconds",
}
"""Options of `[comm]` that have the timeouts of phases. All other phases are parts of a step."""

RECENT_STEPS = 20
"""Steps from which a usual time is known."""

CHECKPOINT_GROUP = "checkpoint"
"""Description of the process group that a save in the background uses. Its timeout never changes."""


def set_training_timeouts(seconds: float) -> None:
    """Set the timeout of collectives that start from now on, in all groups but that of background saves."""
    set_timeouts(seconds, but_for=CHECKPOINT_GROUP)


class PhaseTimeouts(CurrentPhase):
    """Remembers where training is, and gives each phase its timeout.

    A collective has the timeout of the phase in which it starts. Ranks run beside each other within a few
    collectives, except in the starting steps. So all ranks wait for each other after those, before the short timeout
    of steps counts.

    Make it before the process group starts, with `init_timeout_seconds` as the timeout of that group. The phase
    "start" sets no timeout.

    Args:
        set_seconds: sets the timeout of collectives that start from now on.
        wait_for_all: returns when every rank has called it.
        began: time at which the process began, by `time.monotonic`.
    """

    def __init__(
        self,
        config: Comm,
        *,
        set_seconds: Callable[[float], None] = set_training_timeouts,
        wait_for_all: Callable[[], object] = dist.barrier,
        began: float | None = None,
    ) -> None:
        super().__init__(began=began)
        self._config = config
        self._set_seconds, self._wait_for_all = set_seconds, wait_for_all
        self._steps = 0
        self._option = "init_timeout_seconds"
        self._seconds = 0
        self._step_began: float | None = None
        self.recent_steps: deque[float] = deque(maxlen=RECENT_STEPS)
        """Seconds of the latest steps, without the starting ones, validation and saves."""

    @property
    def timeout(self) -> tuple[str, int]:
        """Option that has the timeout of the present phase, and its seconds."""
        option = self._option
        return f"comm.{option}", getattr(self._config, option)

    @property
    def shortest_timeout(self) -> int:
        return min(self._config.model_dump().values())

    @property
    def is_starting(self) -> bool:
        """Return whether the present step may compile."""
        return self._steps <= STARTING_STEPS

    def forget_step(self) -> None:
        """Leave the time of the present step out of `recent_steps`. Another thread may call it."""
        self._step_began = None

    def _end_step(self) -> None:
        if self._step_began is not None and not self.is_starting:
            self.recent_steps.append(time.monotonic() - self._step_began)
        self._step_began = None

    def begin_step(self, step: int) -> None:
        self._end_step()
        super().begin_step(step)
        self._steps += 1
        if self._steps == STARTING_STEPS + 1:
            self._wait_for_all()
        self._use(self._option_of_step())
        self._step_began = self.position.since

    def phase(self, name: str) -> None:
        super().phase(name)
        if name in OPTIONS:
            self._end_step()
        self._use(OPTIONS.get(name) or self._option_of_step())

    def _option_of_step(self) -> str:
        return "train_timeout_seconds" if self._steps > STARTING_STEPS else "compile_timeout_seconds"

    def _use(self, option: str) -> None:
        self._option = option
        if (seconds := getattr(self._config, option)) != self._seconds:
            self._set_seconds(seconds)
            self._seconds = seconds
