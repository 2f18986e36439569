"""Timeouts of collectives: how long a rank waits for the others, which depends on what training does."""

from collections.abc import Callable

import torch.distributed as dist

from titanlite.observer import CurrentPhase, Phase
from titanlite.runtime.private_torch.compiler import compile_seconds
from titanlite.runtime.private_torch.process_groups import set_timeouts
from titanlite.schema import Comm

STARTING_STEPS = 2
"""Steps of a start that may compile, and so have the timeout of the start."""

CHECKPOINT_GROUP = "checkpoint"
COPY_GROUP = f"{CHECKPOINT_GROUP} copies"
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
        super().__init__(began=began, compiled_before=compile_seconds())
        self._config = config
        self._set_seconds, self._wait_for_all = set_seconds, wait_for_all
        self._steps = 0
        self._option = "init_timeout_seconds"
        self._seconds = 0

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

    def begin_step(self, step: int) -> None:
        super().begin_step(step)
        self._steps += 1
        if self._steps == STARTING_STEPS + 1:
            self._wait_for_all()
        self._use(self.position.name)

    def on_phase(self, phase: Phase) -> None:
        super().on_phase(phase)
        self._use(self.position.name)

    def _use(self, phase: Phase) -> None:
        timeout = phase.timeout
        if timeout == "step":
            timeout = "init" if self.is_starting else "train"
        self._option = f"{timeout}_timeout_seconds"
        if (seconds := getattr(self._config, self._option)) != self._seconds:
            self._set_seconds(seconds)
            self._seconds = seconds
