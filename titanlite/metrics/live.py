"""Live block at the foot of a terminal: the state of a run in three lines. Lines of the log scroll above it."""

import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from titanlite.metrics.clock import format_seconds
from titanlite.runtime.console import LOGGER, ConsoleHandler

BARS = "▁▂▃▄▅▆▇█"
POINTS = 30
"""Losses in the sparkline: those of the latest records."""
WIDTH = 24
"""Characters of the progress bar."""
REFRESH_SECONDS = 1.0
"""Shortest time between two drawings."""


class LiveBlock:
    """State of a run, and the block that shows it.

    Args:
        name: of the run.
        steps: of the whole run.
        step: step at which this start resumed.
        clock: returns a time in seconds.
    """

    def __init__(self, name: str, *, steps: int, step: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._name, self._steps, self._resumed = name, steps, step
        self._clock = clock
        self._done = step
        self._began = clock()
        self._first: tuple[int, float] | None = None
        """Step and time of the first record. ETA counts from there: the first step of a start is slow."""
        self._losses: deque[float] = deque(maxlen=POINTS)
        self._record: dict[str, Any] | None = None
        self._validation: tuple[int, float] | None = None
        self._saved: tuple[int, float] | None = None
        self._live: Live | None = None
        self._drawn = 0.0

    @contextmanager
    def drawn(self, console: Console) -> Iterator[None]:
        """Draw the block at the foot of a terminal within the context. What Python prints appears above it.

        A rank of torchrun also copies its prints to its log (`run/raw_output.py`): those stay where they are.
        """
        redirect = "TORCHELASTIC_RUN_ID" not in os.environ
        options: dict[str, Any] = {"redirect_stdout": redirect, "redirect_stderr": redirect}
        with Live(console=console, auto_refresh=False, **options) as self._live:
            console.show_cursor(True)  # a process that ends at once could not bring it back
            self._draw()
            try:
                yield
            finally:
                self._draw()
                self._live = None

    def begin_step(self, step: int) -> None:
        self._done = step - 1
        if self._clock() - self._drawn >= REFRESH_SECONDS:
            self._draw()

    def show(self, record: dict[str, Any]) -> None:
        """Show a record of metrics.jsonl."""
        self._record, self._done = record, record["step"]
        if record["loss"] == record["loss"]:
            self._losses.append(record["loss"])
        self._first = self._first or (record["step"], self._clock())
        self._draw()

    def show_validation(self, step: int, loss: float) -> None:
        self._validation = step, loss

    def show_saved(self, step: int) -> None:
        self._saved = step, self._clock()

    def lines(self, width: int = 1000) -> list[str]:
        """Return the lines of the block, so short that they fit: what matters least is left out first.

        Args:
            width: columns of the terminal.
        """
        now = self._clock()
        if not self._record:
            return [self._head(now, width), "the first step has begun" if self._done == self._resumed else "", ""]
        record = self._record
        loss = f"loss {record['loss']:.4f}"
        more = f"grad_norm {record['grad_norm']:.3f}  lr {record['lr']:.2e}"
        if self._validation:
            more += f"  validation {self._validation[1]:.4f} (step {self._validation[0]:,})"
        points = max(0, width - len(loss) - len(more) - 4)
        parts = {
            "speed": f"{record['tokens_per_second']:,.0f} tokens/s  {record['step_seconds']:.3f} s/step",
            "MFU": f"MFU {record['mfu']:.1%}" if record["mfu"] is not None else "MFU n/a",
            "data": f"data {record['data_wait_seconds'] / record['step_seconds']:.1%}",
            "memory": f"memory {record['memory_gib']:.2f} GiB",
        }
        if self._saved:
            parts["saved"] = f"saved step {self._saved[0]:,}, {format_seconds(now - self._saved[1])} ago"
        for least in ("data", "MFU", "memory"):
            if len("  ".join(parts.values())) > width:
                parts.pop(least)
        sparks = sparkline([*self._losses][-points:] if points else [])
        return [self._head(now, width), f"{loss}  {sparks}  {more}", "  ".join(parts.values())]

    def _head(self, now: float, width: int) -> str:
        share = self._done / max(self._steps, 1)
        steps = f"step {self._done:,}/{self._steps:,}  {share:.1%}"
        seconds = self._seconds_left(now)
        left = f"{format_seconds(seconds)} left" if seconds else ""
        so_far = f"{format_seconds(now - self._began)} so far"
        for size, time_shown in ((WIDTH, True), (WIDTH // 2, True), (WIDTH // 2, False), (0, False)):
            bar = f"{'━' * round(size * share):─<{size}}"
            times = ", ".join(part for part in (so_far if time_shown or not left else "", left) if part)
            head = "  ".join(part for part in (self._name, bar, steps, times) if part)
            if len(head) <= width:
                return head
        return f"{steps}  {times}"

    def _seconds_left(self, now: float) -> float | None:
        """Return the time that the remaining steps take, at the pace of all steps after the first record."""
        if self._first is None or self._done <= self._first[0]:
            return None
        return (now - self._first[1]) / (self._done - self._first[0]) * (self._steps - self._done)

    def _draw(self) -> None:
        if self._live:
            self._drawn = self._clock()
            # The last line is empty: what another program prints begins there.
            self._live.update(
                Text("\n".join([*self.lines(self._live.console.width), ""]), no_wrap=True, overflow="ellipsis"),
                refresh=True,
            )


def sparkline(values: Sequence[float]) -> str:
    """Return a character for each value, from the lowest to the highest."""
    low, high = min(values, default=0), max(values, default=0)
    size = (len(BARS) - 1) / (high - low) if high > low else 0
    return "".join(BARS[round((value - low) * size)] for value in values)


@contextmanager
def live_block(name: str, *, steps: int, step: int) -> Iterator[LiveBlock | None]:
    """Draw a block within the context if the log goes to a terminal, and print the log's lines above it."""
    handlers = [one for one in logging.getLogger(LOGGER).handlers if isinstance(one, ConsoleHandler)]
    console = Console(file=handlers[0].stream) if handlers else None
    if console is None or not console.is_terminal or console.is_dumb_terminal:
        yield None
        return
    block = LiveBlock(name, steps=steps, step=step)
    with block.drawn(console):
        handlers[0].block = console
        try:
            yield block
        finally:
            handlers[0].block = None
