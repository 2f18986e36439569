"""Standard output and error that never hold a process up: a thread writes them, and drops lines that nobody reads.

A pipe whose reader is stuck, or a terminal after Ctrl-S, blocks whoever writes. Training, the watchdog and the thread
that receives signals all write. Imports no torch.
"""

import io
import os
import select
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from queue import Full, Queue
from typing import TextIO, cast

MOST_WAITING = 1000
"""Writes, a line each, that wait for a reader. Further ones are dropped."""
WAIT_SECONDS = 1.0
"""Longest time for which a line waits until it is written. So lines of both streams keep their order, and nothing is
lost by the end of a process. After it, lines do not wait until the thread has caught up."""
END_SECONDS = 5.0
"""Longest time for which the end of a process waits for a reader."""


class _QueuedWrites(io.RawIOBase):
    """Raw stream to a file descriptor of its own, written by a thread. The end of its reader is no error."""

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self._descriptor, self._owner = os.dup(descriptor), os.getpid()
        self._waiting: Queue[bytes] = Queue(MOST_WAITING)
        self._is_behind, self._dropped = False, 0
        threading.Thread(target=self._write_all, name="console", daemon=True).start()

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def writable(self) -> bool:
        return True

    def write(self, data: "bytes | bytearray | memoryview") -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        text = bytes(data)
        if os.getpid() != self._owner:  # a forked process has no thread that writes
            return os.write(self._descriptor, text)
        notice = f"[{self._dropped:,} lines were dropped: nobody read them]\n".encode() if self._dropped else b""
        try:
            self._waiting.put_nowait(notice + text)
        except Full:
            self._dropped += text.count(b"\n")
            return len(text)
        self._dropped = 0
        self._is_behind = not self.drain(0 if self._is_behind else WAIT_SECONDS)
        return len(text)

    def drain(self, seconds: float) -> bool:
        """Wait until everything is written. Returns whether it is."""
        with self._waiting.all_tasks_done:
            return self._waiting.all_tasks_done.wait_for(lambda: not self._waiting.unfinished_tasks, seconds)

    def _write_all(self) -> None:
        while True:
            rest = memoryview(self._waiting.get())
            try:
                while rest:
                    try:
                        rest = rest[os.write(self._descriptor, rest) :]
                    except BlockingIOError:  # another program has made the pipe non-blocking
                        ready = select.poll()
                        ready.register(self._descriptor, select.POLLOUT)
                        ready.poll()
            except OSError:  # its reader has ended, or a disk is full
                pass
            finally:
                self._waiting.task_done()


def queued(stream: TextIO) -> TextIO:
    """Return a stream to the same place, of which no write blocks for long; the stream itself if it is no file."""
    if isinstance(_raw(stream), _QueuedWrites):
        return stream
    try:
        raw = _QueuedWrites(stream.fileno())
    except (OSError, ValueError, AttributeError):  # a notebook's stream has no descriptor
        return stream
    buffer = io.BufferedWriter(cast(io.RawIOBase, raw))
    return io.TextIOWrapper(buffer, encoding=stream.encoding, errors="backslashreplace", line_buffering=True)


@contextmanager
def queued_output() -> Iterator[None]:
    """Let no write to standard output or error block in this context, nor after it. The process ends next.

    The end of the context waits for a reader, END_SECONDS at most.
    """
    sys.stdout, sys.stderr = queued(sys.stdout), queued(sys.stderr)
    streams = sys.stdout, sys.stderr
    try:
        yield
    finally:
        deadline = time.monotonic() + END_SECONDS
        for stream in (sys.stdout, sys.stderr, *streams):
            with suppress(OSError, ValueError):
                stream.flush()
        for stream in streams:
            if isinstance(raw := _raw(stream), _QueuedWrites):
                raw.drain(deadline - time.monotonic())


def open_closed_streams() -> None:
    """Open /dev/null in place of standard streams that are closed (`>&-`).

    Otherwise the next file that is opened gets the number of standard output, and libraries print into it.
    """
    if sys.stdin is None:  # the descriptor was closed when Python began
        sys.stdin = _nowhere(0, "r")
    if sys.stdout is None:
        sys.stdout = _nowhere(1, "w")
    if sys.stderr is None:
        sys.stderr = _nowhere(2, "w")


def _nowhere(number: int, mode: str) -> TextIO:
    descriptor = os.open(os.devnull, os.O_RDWR)
    if descriptor != number:
        os.dup2(descriptor, number)
        os.close(descriptor)
    return cast(TextIO, os.fdopen(number, mode, closefd=False))


def _raw(stream: TextIO) -> object:
    return getattr(getattr(stream, "buffer", None), "raw", None)
