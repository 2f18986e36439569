"""The line that a terminal shows below the others while a run trains: its step, its loss so far, and the time left."""

import time
from collections import deque
from collections.abc import Collection
from shutil import get_terminal_size

from titanlite.metrics.durations import format_seconds
from titanlite.runtime.console import terminal

BARS = "▁▂▃▄▅▆▇█"
WIDTH = 24
"""Records in the curve, the newest ones: a long run neither keeps more nor draws them again."""
REDRAW_SECONDS = 0.2


class ProgressLine:
    """Line of rank 0's terminal. Without a terminal, nothing is shown.

    It asks the device for nothing: the loss is that of the newest record.

    Args:
        step: step at which the run resumes.
        steps: steps of the whole run.
    """

    def __init__(self, *, step: int, steps: int) -> None:
        self._terminal = terminal()
        self._first, self._steps = step, steps
        self._began = self._drawn = time.monotonic()
        self._losses: deque[float] = deque(maxlen=WIDTH)

    def record(self, loss: float) -> None:
        """Add a point of the curve."""
        self._losses.append(loss)

    def end_step(self, step: int) -> None:
        now = time.monotonic()
        if self._terminal is None or now - self._drawn < REDRAW_SECONDS:
            return
        self._drawn = now
        left = (now - self._began) / (step - self._first) * (self._steps - step)
        text = progress_text(step, self._steps, self._losses, seconds_left=left)
        self._terminal.redraw(text[: get_terminal_size().columns - 1])

    def close(self) -> None:
        """Remove the line."""
        if self._terminal is not None:
            self._terminal.redraw("")


def progress_text(step: int, steps: int, losses: Collection[float], *, seconds_left: float) -> str:
    """Return the line, with the losses of the newest records, the last one last."""
    loss = f"  {sparkline(losses)}  loss {[*losses][-1]:.4f}" if losses else ""
    return f"step {step:,} of {steps:,}{loss}  {format_seconds(seconds_left)} left"


def sparkline(values: Collection[float]) -> str:
    """Return a curve with a character for each value. NaN and inf are blank."""
    finite = [value for value in values if abs(value) < float("inf")]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((value - low) * scale)] if abs(value) < float("inf") else " " for value in values)
