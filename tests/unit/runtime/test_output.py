"""Standard output that nobody reads, or that is closed, holds no process up."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TextIO

import pytest

from tests.support.helpers import mentions
from titanlite.runtime.output import MOST_WAITING, WAIT_SECONDS, queued


@pytest.fixture
def pipe() -> Iterator[tuple[int, TextIO]]:
    """Reading end of a pipe, and a stream into it."""
    reader, writer = os.pipe()
    with open(writer, "w") as stream:
        yield reader, queued(stream)
    os.close(reader)


def fill(descriptor: int) -> int:
    """Fill a pipe, and return the number of bytes."""
    written = 0
    os.set_blocking(descriptor, False)
    with suppress(BlockingIOError):
        while True:
            written += os.write(descriptor, b"." * 512)
    os.set_blocking(descriptor, True)
    return written


def test_a_full_pipe_holds_a_line_up_once_and_says_what_was_dropped(pipe: tuple[int, TextIO]) -> None:
    reader, stream = pipe
    filled = fill(stream.fileno())
    lines, began = MOST_WAITING + 500, time.monotonic()
    for number in range(lines):
        print(number, file=stream)
    assert WAIT_SECONDS <= time.monotonic() - began < 2 * WAIT_SECONDS
    text = b""
    while not text.endswith(f"\n{MOST_WAITING}\n".encode()):  # one is in the hands of the thread
        text += os.read(reader, 65536)
    print("the next", file=stream)
    while not text.endswith(b"next\n"):
        text += os.read(reader, 65536)
    kept = [str(number) for number in range(MOST_WAITING + 1)]
    *found, dropped, last = text[filled:].decode().splitlines()
    assert (found, last) == (kept, "the next")
    assert mentions(dropped, lines - len(kept))


def test_a_reader_that_has_ended_is_no_error_and_takes_no_time() -> None:
    reader, writer = os.pipe()
    with open(writer, "w") as direct:
        stream = queued(direct)
        os.close(reader)
        began = time.monotonic()
        for number in range(2 * MOST_WAITING):
            print(number, file=stream)
    assert time.monotonic() - began < WAIT_SECONDS


CLOSED = """
import os, sys
from titanlite.runtime.output import open_closed_streams
open_closed_streams()
print("nowhere")
print("nowhere", file=sys.stderr)
print(sys.stdin.read(), end="")
with open(sys.argv[1], "w") as file:
    file.write(f"{file.fileno()} {[os.readlink(f'/proc/self/fd/{number}') for number in range(3)]}")
"""


def test_closed_streams_lead_nowhere(tmp_path: Path) -> None:
    command = f'"{sys.executable}" -c "$0" "$1" <&- >&- 2>&-'
    subprocess.run(["bash", "-c", command, CLOSED, str(tmp_path / "file")], check=True, timeout=60)
    assert (tmp_path / "file").read_text() == f"3 {['/dev/null'] * 3}"
