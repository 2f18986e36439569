"""Live block of a terminal: its arithmetic by a clock of the test, and what it does to the log."""

import logging
import os
import pty
import threading
from pathlib import Path

import pytest

from tests.helpers import TinyRun, train_on_this_rank
from titanlite.metrics.live import LiveBlock
from titanlite.runtime.console import ConsoleHandler

RECORD = {
    "step": 10, "loss": 4.0, "grad_norm": 0.5, "lr": 1e-3, "tokens_per_second": 2000.0, "step_seconds": 0.5,
    "mfu": 0.4, "data_wait_seconds": 0.005, "memory_gib": 70.25,
}  # fmt: skip


class Clock:
    def __init__(self) -> None:
        self.now = 50.0

    def __call__(self) -> float:
        return self.now


def test_the_block_has_the_state_of_the_run() -> None:
    clock = Clock()
    block = LiveBlock("run", steps=200, step=5, clock=clock)
    clock.now += 65
    assert block.lines() == [
        "run  ━" + "─" * 23 + "  step 5/200  2.5%  1 min 05 s so far",
        "the first step has begun",
        "",
    ]
    block.show(RECORD)
    assert " left" not in block.lines()[0]  # the pace is not known yet
    clock.now += 20
    block.begin_step(51)  # 40 steps in 20 s: 0.5 s each, validation and saves included
    block.show_saved(40)
    block.show_validation(50, 3.25)
    clock.now += 5
    block.show({**RECORD, "step": 60, "loss": 3.0, "mfu": None})
    assert block.lines() == [
        "run  ━━━━━━━" + "─" * 17 + "  step 60/200  30.0%  1 min 30 s so far, 1 min 10 s left",  # 140 steps of 25/50 s
        "loss 3.0000  █▁  grad_norm 0.500  lr 1.00e-03  validation 3.2500 (step 50)",
        "2,000 tokens/s  0.500 s/step  MFU n/a  data 1.0%  memory 70.25 GiB  saved step 40, 5 s ago",
    ]


@pytest.mark.long
@pytest.mark.usefixtures("single_process_group")
def test_a_terminal_gets_the_block_and_the_log_file_the_lines(tiny: TinyRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    reader, writer = pty.openpty()
    seen: list[bytes] = []

    def read() -> None:
        while b"END OF TEST" not in b"".join(seen[-2:]):
            seen.append(os.read(reader, 4096))

    thread = threading.Thread(target=read)
    thread.start()
    logger = logging.getLogger("titanlite")
    with os.fdopen(writer, "w") as terminal:
        monkeypatch.setattr(logger, "handlers", [ConsoleHandler(terminal)])
        monkeypatch.setattr(logger, "level", logging.INFO)
        run = train_on_this_rank(tiny.config("--training.steps=3"), 0, 1)
        terminal.write("END OF TEST\n")
        terminal.flush()
        thread.join(60)
    os.close(reader)
    text = b"".join(seen).decode()
    last = text[text.rindex("tiny  ━") :]
    assert "step 3/3  100.0%" in last.splitlines()[0]
    assert f"loss {tiny.losses()[-1]:.4f}" in last.splitlines()[1]
    assert "step     3  loss" not in text
    assert "step     3  loss" in Path(run.folder.logs, "rank-0.log").read_text()
