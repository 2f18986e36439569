"""Live block of a terminal: its arithmetic by a clock of the test, and what it does to the log."""

import logging
import os
import pty
import threading
from pathlib import Path

import pytest

from tests.helpers import TinyRun, train_on_this_rank
from titanlite.runtime.console import ConsoleHandler


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
