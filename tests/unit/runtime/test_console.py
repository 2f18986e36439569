"""The log of a rank, and commands in what is printed, in places that changed under a run."""

import logging
import os
import sys
from pathlib import Path

import pytest

from titanlite.runtime.console import log_to_file, shell_command


def test_a_log_file_that_is_a_pipe_is_put_aside(tmp_path: Path) -> None:
    """Opening it would wait for its reader."""
    log = tmp_path / "rank-0.log"
    os.mkfifo(log)
    assert log_to_file(tmp_path, 0) == log
    logging.getLogger("titanlite").error("a line")
    assert log.read_text().endswith("ERROR a line\n")
    assert sorted(os.listdir(tmp_path)) == ["rank-0.log", "rank-0.log.damaged-1"]


def test_a_command_is_named_where_the_current_folder_was_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As at the end of a run that has saved all."""
    program = tmp_path / "bin" / "python"
    program.parent.mkdir()
    program.with_name("command").touch()
    monkeypatch.setattr(sys, "executable", str(program))
    monkeypatch.chdir(tmp_path)
    assert shell_command("command") == "bin/command"
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert shell_command("command") == str(program.with_name("command"))
