"""The line that a terminal shows below the others."""

import io
import logging
import re

import pytest

from titanlite.metrics.progress_line import WIDTH, ProgressLine, progress_text, sparkline
from titanlite.runtime.console import ConsoleHandler


def test_a_curve_falls_with_the_loss() -> None:
    assert sparkline([8.0, 4.0, 1.0]) == "█▄▁"
    assert sparkline([*range(8)][::-1]) == "█▇▆▅▄▃▂▁"
    assert sparkline([7.0]) == "▁"
    assert sparkline([3.0, float("nan"), 1.0]) == "█ ▁"
    assert sparkline([float("inf"), float("nan")]) == "  "
    assert sparkline([2.0, 2.0]) == "▁▁"


def test_the_line_names_step_newest_loss_and_time_left() -> None:
    assert (
        progress_text(43, 140, [7.7, 4.2131], seconds_left=92.2) == "step 43 of 140  █▁  loss 4.2131  1 min 32 s left"
    )
    assert progress_text(1, 2, [], seconds_left=3.0) == "step 1 of 2  3 s left"


def test_a_long_run_keeps_the_newest_records_only(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal:
        shown = ""

        def redraw(self, text: str) -> None:
            self.shown = text

    shown = Terminal()
    monkeypatch.setattr("titanlite.metrics.progress_line.terminal", lambda: shown)
    monkeypatch.setattr("titanlite.metrics.progress_line.REDRAW_SECONDS", -1)
    line = ProgressLine(step=0, steps=2000)
    for step in range(1, 1001):
        line.record(float(step))
        line.end_step(step)
    assert f"{sparkline([*map(float, range(1001 - WIDTH, 1001))])}  loss 1000.0000" in shown.shown


def test_lines_of_the_log_scroll_above_the_line() -> None:
    """A terminal is emulated: after each write, the rows are those that a person sees."""
    stream = io.StringIO()
    handler = ConsoleHandler(stream)
    seen = []
    for act in (
        lambda: handler.redraw("step 1 of 2"),
        lambda: handler.emit(logging.makeLogRecord({"msg": "step 1  loss 7.7"})),
        lambda: handler.redraw("step 2 of 2"),
        lambda: handler.redraw(""),
        lambda: handler.emit(logging.makeLogRecord({"msg": "done"})),
    ):
        act()
        seen.append(rows(stream.getvalue()))
    assert seen == [
        ["step 1 of 2"],
        ["step 1  loss 7.7", "step 1 of 2"],
        ["step 1  loss 7.7", "step 2 of 2"],
        ["step 1  loss 7.7", ""],
        ["step 1  loss 7.7", "done", ""],
    ]


def rows(written: str) -> list[str]:
    """Return what a terminal shows after these characters."""
    return [re.split("\r\x1b\\[2K", row)[-1] for row in written.split("\n")]
