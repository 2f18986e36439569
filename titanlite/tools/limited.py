"""Process with limits on its time and its memory, for what others wrote: chat templates, and files of tasks."""

import json
import multiprocessing
import signal
import subprocess
import sys
import weakref
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from titanlite.tools.limited_program import OUT_OF_MEMORY

PROGRAM = Path(__file__).with_name("limited_program.py")
SECONDS = 3.0
"""Processor time of one request."""
WAIT = 120.0
"""Seconds after which a process that does not answer, and takes no processor time either, is ended."""
MEMORY = 2**29
"""Bytes that a process may take, on Linux."""


class Ended(Exception):
    """The process has ended, with the reason."""


class LimitedProcess:
    """The program `limited_program`. It ends when nothing refers to this object any more.

    Args:
        worker: Python file with a class `Worker`, which answers the requests.
        what: name of one request, for errors.
    """

    def __init__(self, worker: Path, what: str, *, seconds: float = SECONDS, memory: int = MEMORY) -> None:
        here, there = multiprocessing.Pipe()
        self._connection, self._what, self._limits = here, what, (seconds, memory)
        words = [sys.executable, "-P", PROGRAM, there.fileno(), worker, seconds, memory]
        self._process = subprocess.Popen(
            [*map(str, words)],
            pass_fds=[there.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # a terminal's Ctrl-C is for this process
        )
        there.close()
        self._end = weakref.finalize(self, _end, self._process, here)

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Send a request, and return the answer.

        Raises:
            Ended: the process has reached one of its limits.
        """
        try:
            self._connection.send(request)
            if self._connection.poll(WAIT):
                return json.loads(self._connection.recv_bytes())
        except (EOFError, OSError):
            self._process.wait()
        code = self._process.poll()
        self._end()
        seconds, memory = self._limits
        if code is None:
            raise Ended(f"the process that evaluates it has not answered for {WAIT:g} s")
        if code == OUT_OF_MEMORY:
            raise Ended(f"it takes more than {memory / 2**20:,.0f} MiB for {self._what}")
        if code == -signal.SIGPROF:
            raise Ended(f"it takes more than {seconds:g} s of processor time for {self._what}")
        raise Ended(f"the process that evaluates it has ended (exit code {code})")


def _end(process: "subprocess.Popen[bytes]", connection: Connection) -> None:
    connection.close()
    process.kill()
    process.wait()
