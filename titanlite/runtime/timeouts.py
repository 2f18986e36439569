"""Timeouts of collectives: how long a rank waits for the others, which depends on what training does."""

from collections.abc import Callable

import torch.distributed as dist

from titanlite.config.schema import Comm
from titanlite.observer import CurrentPhase
from titanlite.runtime.private_torch.process_groups import set_timeouts

STARTING_STEPS = 2
"""Steps of a start that may compile, and so have the timeout of the start."""

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

    Args:
        set_seconds: sets the timeout of collectives that start from now on.
        wait_for_all: returns when every rank has called it.
    """

    def __init__(
        self,
        config: Comm,
        *,
        set_seconds: Callable[[float], None] = set_training_timeouts,
        wait_for_all: Callable[[], object] = dist.barrier,
    ) -> None:
        super().__init__()
        self._start = config.init_timeout_seconds
        self._step = config.train_timeout_seconds
        self._others = {
            "validation": config.init_timeout_seconds,
            "checkpoint": config.save_timeout_seconds,
            "end": config.save_timeout_seconds,
        }
        self._set_seconds, self._wait_for_all = set_seconds, wait_for_all
        self._steps = 0
        self._seconds = 0
        self._use(self._start)

    def begin_step(self, step: int) -> None:
        super().begin_step(step)
        self._steps += 1
        if self._steps == STARTING_STEPS + 1:
            self._wait_for_all()
        self._use(self._step if self._steps > STARTING_STEPS else self._start)

    def phase(self, name: str) -> None:
        super().phase(name)
        if name in self._others:
            self._use(self._others[name])

    def _use(self, seconds: int) -> None:
        if seconds != self._seconds:
            self._set_seconds(seconds)
            self._seconds = seconds
