"""Output of a rank that no logger writes: prints of the user's code, lines of NCCL, the last words of a C++ library.

One rank of several shares the console with the others. So its log gets a copy of all that it prints.
"""

import logging
import os
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import TextIO, cast

from titanlite.runtime.console import LOGGER, ConsoleHandler
from titanlite.runtime.output import queued
from titanlite.runtime.signals import shielding_children


def copy_output(log: Path) -> None:
    """Copy what this process, its libraries and its workers print to a log file. The console gets the same.

    Python's own streams write to both. What is below Python goes through a process `tee` for each stream, which
    outlives this process: last words are not lost. Lines of the logger are in the log already.
    """
    if (tee := shutil.which("tee")) is None:
        return
    handlers = [it for it in logging.getLogger(LOGGER).handlers if isinstance(it, ConsoleHandler)]
    sys.stdout, console = _copied(sys.stdout, 1, log, tee)
    sys.stderr, _ = _copied(sys.stderr, 2, log, tee)
    for handler in handlers:
        handler.setStream(console)


def _copied(stream: TextIO, number: int, log: Path, tee: str) -> tuple[TextIO, TextIO]:
    """Let a process copy what goes to a file descriptor. Returns a stream to both places, and one to the console."""
    stream.flush()
    direct = queued(stream)
    with shielding_children():
        child = subprocess.Popen([tee, "-a", str(log)], stdin=subprocess.PIPE, stdout=direct)
    assert child.stdin is not None
    os.dup2(child.stdin.fileno(), number)
    child.stdin.close()
    return cast(TextIO, _Both(direct, log.open("a", buffering=1, errors="backslashreplace"))), direct


class _Both:
    """Text stream of the console with a copy of its lines in a file. Progress bars are not copied."""

    def __init__(self, console: TextIO, copy: TextIO) -> None:
        self._console = console
        self._copy = copy

    def write(self, text: str) -> int:
        if "\x1b" not in text and "\r" not in text:
            with suppress(OSError):  # a full disk
                self._copy.write(text)
        return self._console.write(text)

    def flush(self) -> None:
        self._console.flush()

    def __getattr__(self, name: str) -> object:
        return getattr(self._console, name)
